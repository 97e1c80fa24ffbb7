"""Whether the arguments of a call fit a tool's parameters: names, what is required, kinds of values, choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollfeed.conversations.written_calls import read_json

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def fit_arguments(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> Mapping[str, Any] | str:
    """Return the arguments, a text read as the JSON value where another kind is wanted; or why they do not fit.

    Args:
        parameters: JSON Schema of an object. What it says of the insides of values is left to the tool.
        arguments: JSON values.
    """
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    takes = f"it takes {', '.join(properties) or 'none'}"
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"argument {name!r} is missing: {takes}"
    unknown = [name for name in arguments if name not in properties]
    if unknown and not parameters.get("additionalProperties", not properties):
        return f"there is no argument {unknown[0]!r:.80}: {takes}"
    fitted: dict[str, Any] = {}
    for name, value in arguments.items():
        schema = properties.get(name)
        fitted[name] = value = _read(value, schema) if isinstance(schema, Mapping) else value
        if isinstance(schema, Mapping) and (problem := _problem(value, schema)):
            return f"argument {name!r}: {problem}"
    return fitted


def _read(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return the value of a text that is the JSON of what is wanted; anything else as it is."""
    if not isinstance(value, str) or not _kinds(schema) or _problem(value, schema) is None:
        return value
    try:
        read = read_json(value)
    except (ValueError, RecursionError):
        return value
    return value if _problem(read, schema) else read


def _problem(value: Any, schema: Mapping[str, Any]) -> str | None:
    kinds = _kinds(schema)
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"it must be {' or '.join(kinds)}, is {value!r:.80}"
    choices = schema.get("enum")
    if isinstance(choices, Sequence) and value not in choices:
        return f"it must be one of {', '.join(map(repr, choices)):.200}, is {value!r:.80}"
    return None


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """Return the kinds of values that are wanted; none where anything is, or it is not said in a known way."""
    given = schema.get("type")
    if given is None:
        branches = [branch for key in ("anyOf", "oneOf") for branch in schema.get(key) or ()]
        kinds = [_kinds(branch) for branch in branches]
        return [kind for each in kinds for kind in each] if all(kinds) else []
    kinds_given = [given] if isinstance(given, str) else list(given)
    return kinds_given if all(kind in _KINDS for kind in kinds_given) else []


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS[kind]) or (kind == "integer" and isinstance(value, float) and value.is_integer())
