"""Weight versions as servers tell them: what they are called, and which of them sampled which token."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from rollfeed.errors import EngineProtocolError
from rollfeed.types import VersionSpan
from rollfeed.types.engine import check_spans

_DEFAULT_VERSION = "default"
_NUMBERED_VERSION = re.compile(r"(?:[^\W\d]\D*)?(\d{1,15})")
_MOST_VERSIONS = 10**15
"""As many as there are names of at most 15 digits."""
_HASH = re.compile(r"[0-9a-fA-F]{7,64}")


class VersionNameError(EngineProtocolError):
    """A server's weights have a name that is no policy version."""


class NamedSpan(msgspec.Struct, gc=False):
    """An entry of ``weight_versions``: output tokens ``start`` to ``end`` (exclusive) saw these weights."""

    version: str | int
    start: int
    end: int


def version_number(name: str | int) -> int:
    """Return the policy version that a server's weight version stands for.

    ``default`` is 0; otherwise the name is a number, or ends with its only one: ``7``, ``v7``, ``step-7``.

    Raises:
        VersionNameError: If it has no number, or what looks like one is part of a date, a time or a hash.
    """
    if isinstance(name, int) and not isinstance(name, bool) and 0 <= name < _MOST_VERSIONS:
        return name
    if name == _DEFAULT_VERSION:
        return 0
    match = _NUMBERED_VERSION.fullmatch(name) if isinstance(name, str) else None
    if match is None or (name != match[1] and _HASH.fullmatch(match[0])):
        raise VersionNameError(
            f"weight version {name!r} is no policy version: name the weights 'default' or by a whole number such as 7; "
            """on SGLang and vLLM: POST /update_weight_version {"new_version": "0"}"""
        )
    return int(match[1])


def version_told_by(place: str, name: str | int) -> int:
    """Return :func:`version_number` of what a server says at a place, which an error names."""
    try:
        return version_number(name)
    except VersionNameError as error:
        raise EngineProtocolError(f"{place}: {error}") from None


def read_spans(told: Sequence[NamedSpan], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Return who sampled which of a reply's tokens; nothing where there are none.

    Raises:
        EngineProtocolError: If the spans have holes, are out of order, or end elsewhere than the tokens do.
    """
    spans = tuple(VersionSpan(span.start, span.end, version_number(span.version)) for span in told)
    if num_tokens == 0 and all(span.end == 0 for span in spans):
        return ()
    try:
        check_spans(spans, num_tokens)
    except ValueError as error:
        raise EngineProtocolError(f"weight_versions: {error}") from None
    return spans


def with_later_borders(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Return spans of which each but the first begins one token later; one of which nothing is left goes.

    An SGLang server that prepares the next step while one runs has begun that step when it is paused in place: the
    first token that it counts to the new weights still came from the old ones.
    """
    moved: list[VersionSpan] = []
    for index, (start, end, version) in enumerate(spans):
        is_last = index + 1 == len(spans)
        span = VersionSpan(start + (index > 0), end + (not is_last), version)
        if span.start < span.end:
            moved.append(span)
    return tuple(moved)
