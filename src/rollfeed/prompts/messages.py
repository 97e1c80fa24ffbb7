"""Chat messages as people have them, checked and made alike.

What a certain chat template wants of them is decided in :mod:`rollfeed.prompts.chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollfeed.conversations.picture_places import IMAGE_TYPES

_TEXT_TYPES = ("text", "input_text", "output_text")


def read_message(message: Any, where: str) -> dict[str, Any]:
    """Return a message with a role, and as content a text or a list of parts; entries that are null are left out.

    A part is ``{"type": "text", "text": ...}``, or of another kind and as it was given. Calls of tools are objects.

    Raises:
        ValueError: If it is not a message; says ``where``, and what is wrong.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where} must be an object with a role and a content, is {kind_of(message)}")
    kept = {name: value for name, value in message.items() if value is not None}
    calls = _read_calls(kept.pop("tool_calls", None), where)
    if "content" not in kept and not calls and not kept.get("function_call") and "content" not in message:
        raise ValueError(f"{where} has no content")
    content = _read_content(kept.get("content", ""), where)
    return {**kept, "content": content} | ({"tool_calls": calls} if calls else {})


def check_parts(messages: Sequence[Mapping[str, Any]], *, num_images: int) -> None:
    """Refuse parts that are not text, but for images that come with the prompt.

    Raises:
        ValueError: With the first such message.
    """
    found = 0
    for index, message in enumerate(messages):
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "text":
                continue
            found += part["type"] == "image"
            if part["type"] != "image" or found > num_images:
                brings = f" and the prompt brings {num_images} images" if num_images else ""
                raise ValueError(
                    f"message {index} has a part of type {part['type']!r}{brings}: content may hold text only, further "
                    "pictures and audio are not supported (pictures of a data set come by image_key)"
                )


def read_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return definitions of tools as objects; they, and their parameters, may come as JSON text.

    Raises:
        ValueError: If one is something else.
    """
    return [_read_tool(tool) for tool in tools]


def arguments_as_object(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as objects; text that is no JSON object stays text."""
    return with_arguments(message, _as_object)


def arguments_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as JSON text; text stays as it is."""
    return with_arguments(message, _as_text)


def with_arguments(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a message with the arguments of each of its calls changed."""
    changed = dict(message)
    if "tool_calls" in message:
        changed["tool_calls"] = [_call_with(call, change) for call in message["tool_calls"]]
    if isinstance(message.get("function_call"), Mapping):
        changed["function_call"] = _call_with(message["function_call"], change)
    return changed


def kind_of(value: Any) -> str:
    """Return what a value is, for errors."""
    is_empty = isinstance(value, str | list | dict) and not value
    return f"an empty {type(value).__name__}" if is_empty else f"a {type(value).__name__}"


def _read_content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, list | tuple):
        raise ValueError(f"content of {where} must be a text or a list of parts, is {kind_of(content)}")
    return [_read_part(part, where) for part in parts if part is not None]


def _read_part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise ValueError(f"a part of the content of {where} must be a text or an object, is {kind_of(part)}")
    kept = {name: value for name, value in part.items() if value is not None}
    kind = kept.get("type", "text" if "text" in kept else None)
    if not isinstance(kind, str):
        kind = next((name for name in IMAGE_TYPES if name in kept), None)
        if kind is None:
            raise ValueError(f"a part of the content of {where} has no type; a text is {{'type': 'text', 'text': ...}}")
    if kind not in _TEXT_TYPES:
        return {**kept, "type": "image" if kind in IMAGE_TYPES else kind}
    text = kept.get("text", "")
    if not isinstance(text, str):
        raise ValueError(f"the text of a part of the content of {where} is {kind_of(text)}")
    return {**kept, "type": "text", "text": text}


def _read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    calls = _decoded(calls)
    if calls is None:
        return []
    calls = [_decoded(call) for call in calls] if isinstance(calls, list | tuple) else calls
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"tool_calls of {where} must be a list of objects, is {kind_of(calls)}")
    return [{name: value for name, value in call.items() if value is not None} for call in calls]


def _read_tool(tool: Any) -> dict[str, Any]:
    tool = _decoded(tool)
    if not isinstance(tool, Mapping):
        raise ValueError(f"a tool must be an object or its JSON text, is {kind_of(tool)}")
    function = tool.get("function")
    if isinstance(function, Mapping):
        return {**tool, "function": _read_tool(function)}
    return {**tool, "parameters": _decoded(tool["parameters"])} if "parameters" in tool else dict(tool)


def _call_with(call: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": {**function, "arguments": change(function.get("arguments"))}}
    # Without the wrapper, as the model wrote it.
    return {**call, "arguments": change(call.get("arguments"))} if "name" in call else dict(call)


def _as_object(arguments: Any) -> Any:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    decoded = _decoded(arguments)
    return decoded if isinstance(decoded, Mapping) else arguments


def _as_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _decoded(value: Any) -> Any:
    """Return the value of a JSON text; anything else, and other text, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
