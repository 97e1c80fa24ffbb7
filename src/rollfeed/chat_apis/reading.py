"""Bodies of requests read field by field, with errors that name the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollfeed.chat_apis.api_error import ApiError
from rollfeed.chat_apis.asked import ToolChoice
from rollfeed.conversations import read_json
from rollfeed.conversations.picture_places import IMAGE_TYPES
from rollfeed.types.text import well_formed_json

LARGEST_INT32 = 2**31 - 1
MOST_MESSAGES = 100_000
_MOST_STOPS, _LONGEST_STOP = 64, 1_000
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_MEDIA = ("image", "audio", "file", "video", "document")
_FETCHED = ("data:", "http://", "https://")

_FURTHER: Mapping[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "ignore_eos": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "regex": (),
    "ebnf": (),
}
"""Sampling parameters that only some servers have, with the values that change nothing."""


class Fields:
    """Fields of a body by their names; null stands for a field that is not there."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise ApiError("the body must be a JSON object")
        self._body = body
        self._read: set[str] = set()

    def take(self, name: str) -> Any:
        self._read.add(name)
        return self._body.get(name)

    def integer(self, name: str, *, least: int, most: int = LARGEST_INT32) -> int | None:
        """Return a whole number."""
        value = self.take(name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise ApiError(f"{name} must be a whole number of at least {least} and at most {most}", param=name)
        return value

    def number(self, name: str, *, least: float, most: float = 1e9) -> float | None:
        """Return a finite number."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ApiError(f"{name} must be a number of at least {least:g} and at most {most:g}", param=name)
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a truth value, false where it is not there."""
        value = self.take(name)
        if not isinstance(value, bool | None):
            raise ApiError(f"{name} must be true or false", param=name)
        return value is True

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if not isinstance(value, str | None):
            raise ApiError(f"{name} must be a text", param=name)
        return value

    def object(self, name: str) -> Mapping[str, Any]:
        """Return an object, an empty one where it is not there."""
        value = self.take(name)
        if not isinstance(value, dict | None):
            raise ApiError(f"{name} must be an object", param=name)
        return value or {}

    def objects(self, name: str) -> list[Mapping[str, Any]]:
        """Return a list of objects, an empty one where it is not there."""
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > MOST_MESSAGES:
            raise ApiError(f"{name} must be a list of at most {MOST_MESSAGES} objects", param=name)
        for index, each in enumerate(value):
            if not isinstance(each, dict):
                raise ApiError(f"{name}[{index}] must be an object", param=f"{name}[{index}]")
        return value

    def stops(self, name: str) -> tuple[str, ...]:
        """Return the texts at which sampling stops, one or several."""
        value = self.take(name)
        stops = [value] if isinstance(value, str) else value or []
        fits = isinstance(stops, list) and len(stops) <= _MOST_STOPS
        if not fits or not all(isinstance(stop, str) and 0 < len(stop) <= _LONGEST_STOP for stop in stops):
            raise ApiError(f"{name} must be a text, or at most {_MOST_STOPS} of at most {_LONGEST_STOP}", param=name)
        return tuple(stops)

    def refuse(self, neutral: Mapping[str, Sequence[Any]]) -> None:
        """Refuse fields that cannot be had here, but for values that ask for nothing."""
        for name, values in neutral.items():
            if self.take(name) not in (None, *values):
                raise ApiError(f"{name} is not supported here: leave it out", param=name)

    def rest(self, harmless: Iterable[str]) -> list[str]:
        """Return the names of fields that were not read and change what is meant."""
        return sorted(str(name)[:80] for name in self._body.keys() - self._read - set(harmless))


def text_of_parts(content: Any, where: str, *, between: str = "") -> str:
    """Return the text of a content: a text, or parts of it.

    Null is empty; ``between`` is put between parts.

    Raises:
        ApiError: If a part is none of text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return between.join(part_text(part, at) for at, part in _parts(content, where))


def content_of_parts(content: Any, where: str, *, between: str = "") -> str | list[dict[str, Any]]:
    """Return a content as :func:`text_of_parts`, or where it has pictures as :func:`content_of`.

    Raises:
        ApiError: If a part is neither text nor a picture.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return content_of([part_or_picture(part, at) for at, part in _parts(content, where)], between=between)


def content_of(pieces: Sequence[str | dict[str, Any]], *, between: str) -> str | list[dict[str, Any]]:
    """Return texts and pictures as one text, or as parts for a chat template where there are pictures."""
    parts: list[dict[str, Any]] = []
    for piece in pieces:
        if not isinstance(piece, str):
            parts.append(piece)
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += between + piece
        else:
            parts.append({"type": "text", "text": piece})
    if any(part["type"] != "text" for part in parts):
        return parts
    return parts[0]["text"] if parts else ""


def part_or_picture(part: Any, where: str) -> str | dict[str, Any]:
    """Return the text of a part of a content, or ``{"type": "image", "image": URL or data URI}``.

    Raises:
        ApiError: If it is neither.
    """
    if not isinstance(part, dict) or part.get("type") not in IMAGE_TYPES:
        return part_text(part, where)
    held = next((part[name] for name in ("image_url", "source", "image") if part.get(name) is not None), None)
    if isinstance(held, dict) and held.get("type") == "base64":
        held = f"data:{held.get('media_type')};base64,{held.get('data')}"
    elif isinstance(held, dict):
        held = held.get("url")
    if not isinstance(held, str) or not held.startswith(_FETCHED):
        raise ApiError(
            f"{where} is a picture without a URL (http, https) or its bytes (a data URI, or base64); files are not "
            "kept here",
            param=where,
        )
    return {"type": "image", "image": held}


def _parts(content: Any, where: str) -> list[tuple[str, Any]]:
    """Return the parts of a content, each with its place."""
    if not isinstance(content, list):
        raise ApiError(f"{where} must be a text or a list of parts", param=where)
    return [(f"{where}[{index}]", part) for index, part in enumerate(content)]


def part_text(part: Any, where: str) -> str:
    """Return the text of a part of a content. Raises ApiError if it is none of text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ApiError(f"{where} must be an object with a type", param=where)
    kind = part.get("type", "text")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind in _TEXT_PARTS and isinstance(text, str | None):
        return text or ""
    if any(name in str(kind) for name in _MEDIA):
        raise ApiError(
            f"{where} is of type {kind!s:.80}, which is not supported: pictures may be in messages of users and "
            "results of tools, audio, videos and documents nowhere",
            param=where,
        )
    raise ApiError(f"{where} is of type {kind!s:.80}, which is not supported: parts may hold text", param=where)


def arguments_of(arguments: Any) -> Any:
    """Return the arguments of a call as an object; text that is no JSON object stays text."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        read = read_json(arguments)
    except (ValueError, RecursionError):
        return arguments
    return well_formed_json(read) if isinstance(read, dict) else arguments


def tool_call(call_id: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """Return an earlier call in the form that chat templates take."""
    if not isinstance(name, str) or not isinstance(call_id, str | None):
        raise ApiError(f"{where} must have a name and an id, which are texts", param=where)
    function = {"name": name, "arguments": arguments_of(arguments)}
    return {"id": call_id or "", "type": "function", "function": function}


def tool_definition(given: Mapping[str, Any], where: str, *, parameters: str = "parameters") -> dict[str, Any]:
    """Return the definition of a function in the form that chat templates take.

    ``parameters`` is the field of the schema.
    """
    name, schema = given.get("name"), given.get(parameters)
    if not isinstance(name, str) or not name:
        raise ApiError(f"{where} has no name", param=where)
    schema = {} if schema is None else schema
    is_schema = isinstance(schema, dict) and isinstance(schema.get("properties", {}), dict)
    if not is_schema or not isinstance(schema.get("required") or [], list):
        raise ApiError(f"{where}.{parameters} must be a JSON Schema", param=f"{where}.{parameters}")
    described = {"description": given["description"]} if isinstance(given.get("description"), str) else {}
    schema = schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def system_first(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose first ones of the system are one: many chat templates take no second."""
    count = next((at for at, each in enumerate(messages) if each["role"] != "system"), len(messages))
    texts = [each["content"] for each in messages[:count] if each["content"]]
    first = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*first, *messages[count:]]


def read_sampling(fields: Fields, *, stop: str) -> dict[str, Any]:
    """Return the sampling parameters of a body, and what all APIs have with them, by the names of :class:`Asked`."""
    top_k, token_ids = fields.integer("top_k", least=-1), fields.take("stop_token_ids") or []
    if not isinstance(token_ids, list) or not all(type(each) is int and -(2**31) <= each < 2**31 for each in token_ids):
        raise ApiError("stop_token_ids must be a list of token ids", param="stop_token_ids")
    further = {
        "min_new_tokens": fields.integer("min_tokens", least=0) or None,
        "repetition_penalty": fields.number("repetition_penalty", least=0.0),
        "stop_token_ids": tuple(token_ids) or None,
        **{name: each for name, neutral in _FURTHER.items() if (each := fields.take(name)) not in neutral},
    }
    return {
        "model": fields.text("model") or "",
        "temperature": fields.number("temperature", least=0.0),
        "top_p": fields.number("top_p", least=0.0, most=1.0),
        "top_k": top_k or (None if top_k is None else -1),
        "seed": fields.integer("seed", least=-(2**63), most=2**64 - 1),
        "stop": fields.stops(stop),
        "stream": fields.flag("stream"),
        "template_kwargs": fields.object("chat_template_kwargs"),
        "further": {name: value for name, value in further.items() if value is not None},
    }


def read_tool_choice(given: Any, tools: Sequence[Mapping[str, Any]], left_out: list[str]) -> ToolChoice:
    """Return whether calls are wanted; what cannot be promised of them is added to ``left_out``."""
    if given is None or given in tuple(ToolChoice):
        choice = ToolChoice(given or ToolChoice.AUTO)
    elif isinstance(given, dict):
        name = given.get("name") or Fields(given).object("function").get("name")
        if name is not None and name not in [tool["function"]["name"] for tool in tools]:
            raise ApiError(f"tool_choice names {name!r:.80}, which is not among the tools", param="tool_choice")
        choice = ToolChoice.REQUIRED
    else:
        raise ApiError("tool_choice must be auto, none, required, or an object that names a tool", param="tool_choice")
    if choice is ToolChoice.REQUIRED:
        if not tools:
            raise ApiError("tool_choice wants a call, but there are no tools for it", param="tool_choice")
        left_out.append("tool_choice")
    return choice
