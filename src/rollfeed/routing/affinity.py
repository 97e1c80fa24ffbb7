"""Requests that do best at one server: those of one conversation, and those of one prompt.

Whoever answers a prompt says so around the calls, and whoever chooses a server asks; what is between the two, functions
of users included, passes it on without knowing, tasks that it starts too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NamedTuple


class Affinity(NamedTuple):
    """The keys of a request, which are compared whole."""

    group: str | None = None
    """Of requests that have one prompt."""
    session: str | None = None
    """Of a conversation, whose requests begin with the earlier ones and their answers."""


_AFFINITY: ContextVar[Affinity] = ContextVar("affinity", default=Affinity())  # noqa: B039 - it is frozen


def current_affinity() -> Affinity:
    """Return what the requests that are made here belong to."""
    return _AFFINITY.get()


def belonging(*, group: str | None = None, session: str | None = None) -> AbstractContextManager[None]:
    """Have the requests made in a block belong to a group and a session."""
    return _Belonging(Affinity(group, session))


class _Belonging(AbstractContextManager[None]):
    """A block whose requests belong together; thousands are under way at once."""

    __slots__ = ("_affinity", "_token")

    def __init__(self, affinity: Affinity) -> None:
        self._affinity = affinity

    def __enter__(self) -> None:
        self._token = _AFFINITY.set(self._affinity)

    def __exit__(self, *exc_info: object) -> None:
        _AFFINITY.reset(self._token)
