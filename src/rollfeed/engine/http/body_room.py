"""Room for replies that have come and have not been read yet.

When thousands of long replies come at once, reading them from the network is faster than decoding them: without a
bound they would all lie in memory side by side. With one, the later ones wait in the operating system's buffers and,
behind those, at the server.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

_FIRST_BYTES = 1 << 20
"""Of a body that is longer; it grows with what comes."""


class Body(bytearray):
    """A reply's bytes, which give their room back when nobody refers to them any more."""

    room: BodyRoom | None = None
    held_bytes = 0

    def __del__(self) -> None:
        if self.room is not None:
            self.room.give_back(self.held_bytes)

    def grown(self, size: int) -> Body:
        """Return a body with the same bytes, the same room, and place for at most ``size``."""
        other = Body(min(2 * len(self), size))
        other[: len(self)] = self
        other.room, other.held_bytes, self.room = self.room, self.held_bytes, None
        return other


class BodyRoom:
    """Bounds the bytes of large bodies that exist at once; one alone is always let in. Belongs to one event loop."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._returned: deque[int] = deque()  # bodies may end in any thread, and even inside a method of this class
        self._waiting: deque[tuple[int, Callable[[Body], None]]] = deque()
        self._loop = asyncio.get_running_loop()

    def take(self, size: int, taken: Callable[[Body], None]) -> None:
        """Call ``taken`` with the beginning of a body of ``size`` bytes: at once, or when there is room for all."""
        self._waiting.append((size, taken))
        self._admit()

    def give_back(self, size: int) -> None:
        """Count a body as gone. From any thread."""
        self._returned.append(size)
        if self._waiting and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._admit)

    def _admit(self) -> None:
        while self._returned:
            self._held_bytes -= self._returned.popleft()
        while self._waiting and (not self._held_bytes or self._held_bytes + self._waiting[0][0] <= self._limit_bytes):
            size, taken = self._waiting.popleft()
            self._held_bytes += size
            body = Body(min(size, _FIRST_BYTES))
            body.room, body.held_bytes = self, size
            taken(body)
