"""The garbage collector while a step is made.

The tasks and requests of a step are many, are born together and live until they are answered: a collector
that looks at all young objects after every 700 new ones walks them over and over and finds nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 50_000
"""After how many new objects the collector looks at them while a step is made."""
_holders: list[tuple[int, int, int]] = []
"""What was set before each block that runs."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the collector look rarely while the block runs, or any other such block of the process.

    Afterwards it is as it was, unless somebody else has set it meanwhile.
    """
    _holders.append(gc.get_threshold())
    if _holders[0][0] and len(_holders) == 1:
        gc.set_threshold(max(NEW_OBJECTS, _holders[0][0]), *_holders[0][1:])
    try:
        yield
    finally:
        first = _holders[0]
        _holders.pop()
        if not _holders and gc.get_threshold()[0] == max(NEW_OBJECTS, first[0]):
            gc.set_threshold(*first)
