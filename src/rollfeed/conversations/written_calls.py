"""Calls of tools as policies write them: read from what was sampled, and shown as messages.

What is no call that can be made is read too, as a fault, so that the policy can be told. Nothing raises.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rollfeed.protocols import CallFormat
from rollfeed.types import Message

_MAX_CALLS = 16
"""Calls of one turn; more are a mistake, and not made."""
_MAX_TRIES = 256
"""Places of a text at which a JSON object is looked for."""
_MAX_DEPTH, _MAX_DIGITS = 32, 19
_WINDOW = 240
"""Characters before a JSON object in which the name of its tool may stand."""

_THOUGHT = re.compile(r".*</think>", re.DOTALL)
_TAG = re.compile(r"<(tool_call|function_call|call)>(.*?)(?:</\1>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_NAME = re.compile(r"([\w.-]+)\s*(.*)", re.DOTALL)
_BEFORE_ARGUMENTS = re.compile(
    r".*(?:\[TOOL_CALLS\]|<\uff5ctool▁sep\uff5c>|<\uff5ctool▁call▁begin\uff5c>|to=functions\.)\s*([\w.-]+)[^{]{0,40}\Z",
    re.DOTALL,
)
"""A tool's name, and what some families write between that and the object with its arguments."""
_BEGINS_AS_CALL = re.compile(r'\{\s*"(?:name|function)"\s*:')


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the policy wrote."""

    name: str
    arguments: Mapping[str, Any]
    """JSON values."""


@dataclass(frozen=True, slots=True)
class UnreadableCall:
    """Something that was meant as a call."""

    problem: str
    """What the policy is told of it."""


Written: TypeAlias = Call | UnreadableCall


@dataclass(frozen=True, slots=True)
class SaidTurn:
    """A turn of the policy, taken apart."""

    text: str
    """What stands before the first call; all of it where there is none."""
    calls: tuple[Written, ...]
    """In their order."""

    def forms(self, *, first_id: int = 0) -> list[Message]:
        """Return the turn as a message with its calls; nothing where there are none, or one cannot be read."""
        if not self.calls or not all(isinstance(call, Call) for call in self.calls):
            return []
        calls = [
            {
                "id": call_id(first_id + number),
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for number, call in enumerate(self.calls)
            if isinstance(call, Call)
        ]
        return [{"role": "assistant", "content": self.text, "tool_calls": calls}]


def call_id(number: int) -> str:
    """Return the id of an episode's call; some chat templates insist on nine letters and digits."""
    return f"call{number % 100_000:05d}"


def read_turn(text: str, call_format: CallFormat, *, tools: Mapping[str, Mapping[str, Any]]) -> SaidTurn:
    """Take a turn apart.

    Calls in thoughts, as text in think tags, are not made.

    ``text`` has its special tokens, but for the one that ended it; ``tools`` are parameters, as JSON Schema, by name.
    Of ``AUTO`` the reader is that of ``HERMES``.
    """
    thought = _THOUGHT.match(text)
    begin = thought.end() if thought else 0
    spoken = text[begin:].partition("<think>")[0]
    if call_format is CallFormat.JSON:
        found = list(_in_json(spoken))
    elif call_format is CallFormat.TAGS:
        found = list(_in_own_tags(spoken, tools))
    else:
        found = list(_in_tags(spoken))
    if not found:
        return SaidTurn(text, ())
    calls = [call for _, call in found]
    if len(calls) > _MAX_CALLS:
        left_out = f"{len(calls) - _MAX_CALLS} further calls were not made: at most {_MAX_CALLS} are in one turn"
        calls = [*calls[:_MAX_CALLS], UnreadableCall(left_out)]
    return SaidTurn(text[: begin + found[0][0]].rstrip(), tuple(calls))


def _in_tags(text: str) -> Iterator[tuple[int, Written]]:
    for tag in _TAG.finditer(text):
        for call in _of_body(tag[2].strip()):
            yield tag.start(), call


def _of_body(body: str) -> list[Written]:
    """Return the calls of what stands in a ``<tool_call>``."""
    if body.startswith(("{", "[")):
        value = _loaded(body)
        if isinstance(value, UnreadableCall):
            return [value]
        return [_of_object(each) for each in (value if isinstance(value, list) else [value])]
    if functions := _FUNCTION.findall(body):
        return [Call(name, dict(_PARAMETER.findall(inside))) for name, inside in functions]
    named = _NAME.fullmatch(body)
    if named is None:
        return [UnreadableCall("the call is empty: a JSON object with name and arguments belongs there")]
    name, rest = named[1], named[2].strip()
    if pairs := _PAIR.findall(rest):
        return [Call(name, {key.strip(): value.strip() for key, value in pairs})]
    value = _loaded(rest) if rest else {}
    if isinstance(value, UnreadableCall):
        return [value]
    return [_of_object({"name": name, "arguments": value})]


def _in_own_tags(text: str, tools: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[int, Written]]:
    if not tools:
        return
    names = "|".join(re.escape(name) for name in sorted(tools, key=len, reverse=True))
    for tag in re.finditer(rf"<({names})>(.*?)(?:</\1>|\Z)|<call>(.*?)(?:</call>|\Z)", text, re.DOTALL):
        if tag[1] is None:
            yield from ((tag.start(), call) for call in _of_body(tag[3].strip()))
            continue
        body, properties = tag[2].strip(), tools[tag[1]].get("properties", {})
        value = _loaded(body) if body.startswith("{") else None
        if isinstance(value, dict) and value.keys() <= properties.keys():
            yield tag.start(), Call(tag[1], value)
        elif only := _only(tools[tag[1]]):
            yield tag.start(), Call(str(tag[1]), {only: body})
        else:
            known = ", ".join(properties)
            yield tag.start(), UnreadableCall(f"{tag[1]}: its arguments must be a JSON object with {known}")


def _only(parameters: Mapping[str, Any]) -> str | None:
    """Return the parameter that text without a name stands for: the one that is required, or the only one."""
    required = list(parameters.get("required") or ())
    names: list[str] = required if len(required) == 1 else list(parameters.get("properties") or ())
    return names[0] if len(names) == 1 else None


def _in_json(text: str) -> Iterator[tuple[int, Written]]:
    place = text.find("{")
    for _ in range(_MAX_TRIES):
        if place < 0:
            return
        window = text[max(0, place - _WINDOW) : place]
        named = _BEFORE_ARGUMENTS.match(window)
        try:
            value, end = _DECODER.raw_decode(text, place)
            _checked(value)
        except (ValueError, RecursionError) as error:
            if named or _BEGINS_AS_CALL.match(text, place):
                yield place, UnreadableCall(_not_json(error))
                return
            end = place + 1
        else:
            if named and "name" not in value:
                yield place - len(window) + named.start(1), Call(named[1], value)
            elif _is_call(value):
                yield place, _of_object(value)
        place = text.find("{", end)


def _is_call(value: Mapping[str, Any]) -> bool:
    inner = value.get("function", value)
    return isinstance(inner, Mapping) and "name" in inner and ("arguments" in inner or "parameters" in inner)


def _of_object(value: Any) -> Written:
    inner = value.get("function", value) if isinstance(value, Mapping) else value
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        return UnreadableCall("the call has no name: write a JSON object with name and arguments")
    arguments = inner.get("arguments", inner.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():
        arguments = _loaded(arguments)
    if isinstance(arguments, UnreadableCall):
        return arguments
    if not isinstance(arguments or {}, Mapping):
        return UnreadableCall(f"{inner['name']:.80}: its arguments must be a JSON object")
    return Call(inner["name"], arguments or {})


def _loaded(text: str) -> Any:
    """Return the value of a JSON text; an UnreadableCall where it is none."""
    try:
        return read_json(text)
    except (ValueError, RecursionError) as error:
        return UnreadableCall(_not_json(error))


def read_json(text: str) -> Any:
    """Return the value of a JSON text, of which the turn journal can store everything.

    Raises:
        ValueError: If it is none, or has a number that is none or of more than 18 digits, or is nested too deeply.
        RecursionError: If it is nested even more deeply.
    """
    return _checked(_DECODER.decode(text))


def _checked(value: Any) -> Any:
    level, depth = [value], 0
    while level := [each for inner in level if isinstance(inner, dict | list) for each in _inside(inner)]:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
    return value


def _inside(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _read_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("a whole number has more than 18 digits: write it as a text")
    return int(digits)


def _read_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits:.20} is too large a number")
    return number


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_int=_read_int, parse_float=_read_float)


def _not_json(error: Exception) -> str:
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return f"the call is not valid JSON: {reason:.120}"


def names_in(definitions: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the parameters of tools by name, from definitions as chat templates take them."""
    functions = [definition.get("function", definition) for definition in definitions]
    return {
        function["name"]: function.get("parameters") or {}
        for function in functions
        if isinstance(function, Mapping) and isinstance(function.get("name"), str)
    }
