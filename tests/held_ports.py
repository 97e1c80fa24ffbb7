"""Ports of loopback that are nobody else's, whether somebody listens there at the moment or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollfeed.testing.held_port import hold_port


@contextmanager
def held_port(port: int = 0) -> Iterator[int]:
    """Give the number of a port, any or a certain one, that is held as :func:`hold_port` says in the block."""
    with hold_port(port=port) as held:
        yield held.getsockname()[1]
