"""Arguments of instruction checks, validated where they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Arguments: TypeAlias = Mapping[str, Any]
Check: TypeAlias = Callable[[str, Arguments], bool]
"""Whether a response follows an instruction; raises ArgumentError for arguments it cannot use."""


class ArgumentError(ValueError):
    """An instruction's arguments are missing or of a wrong kind: the data is at fault, not the response."""


def number(arguments: Arguments, name: str) -> int:
    """Return a whole number of at least 0."""
    value = arguments.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ArgumentError(f"{name} = {value!r:.60} must be a number")
    return value


def text(arguments: Arguments, name: str) -> str:
    """Return a text that is not blank."""
    value = arguments.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ArgumentError(f"{name} = {value!r:.60} must be a text")
    return value


def texts(arguments: Arguments, name: str) -> list[str]:
    """Return a list of texts, at least one."""
    value = arguments.get(name)
    if not isinstance(value, list | tuple) or not value or not all(isinstance(each, str) and each for each in value):
        raise ArgumentError(f"{name} = {value!r:.60} must be a list of texts")
    return list(value)


def holds(count: int, arguments: Arguments, limit: str, *, relation: str = "relation") -> bool:
    """Whether ``count`` stands in the named relation to the limit."""
    wanted = number(arguments, limit)
    match arguments.get(relation):
        case "at least" | "more than or equal to" | None:
            return count >= wanted
        case "less than":
            return count < wanted
        case "at most":
            return count <= wanted
        case "more than":
            return count > wanted
        case "exactly" | "equal to":
            return count == wanted
        case other:
            raise ArgumentError(f"{relation} = {other!r:.60} must be 'at least' or 'less than'")
