"""The garbage collector while a step is made.

The tasks and requests of a step are many, are born together and live until they are answered: a collector
that looks at all young objects after every 700 new ones walks them over and over and finds nothing. So does one that
looks at all objects whenever there are a quarter more, which takes seconds where 20,000 requests are in flight: as many
come anew within a minute, and go without it.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

NEW_OBJECTS = 50_000
"""After how many new objects the collector looks at them while a step is made."""
NOT_NOW = 1 << 30
"""Third threshold of the collector while it is not to look at all objects."""
_SHARE = 0.005
"""Of the time, which looking at all objects may take."""
_GROWTH = 1.5
"""Times the memory of the last look, from which on all objects are looked at however long that takes."""


def _largest_memory() -> int:
    """Return the most that this process has had, in units of the system."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class FullCollections:
    """Puts off what looks at all objects until its time is a small share of all, or memory has grown.

    The collector's own rule, a quarter more objects than the last time, holds beside it.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, peak: Callable[[], int] = _largest_memory
    ) -> None:
        self._clock, self._peak = clock, peak
        self._began = self._not_before = 0.0
        self._peak_before = 0
        self._thresholds = (0, 0, 0)

    def begin(self, first: int, second: int, third: int) -> None:
        """Steer from now on a collector that has these thresholds."""
        self._thresholds = first, second, third
        self._set()
        gc.callbacks.append(self.note)

    def end(self) -> None:
        """Steer no longer; the thresholds stay as they are."""
        with suppress(ValueError):  # somebody else has emptied the list
            gc.callbacks.remove(self.note)

    def note(self, phase: str, about: dict[str, int]) -> None:
        """Be told of a collection, as a member of ``gc.callbacks``."""
        generation = about["generation"]
        if generation == 0:
            return
        if phase == "start":
            self._began = self._clock()
            return
        if generation == 2:
            now = self._clock()
            self._not_before, self._peak_before = now + (now - self._began) / _SHARE, self._peak()
        if gc.get_threshold()[0] == self._thresholds[0]:  # nobody else has set them
            self._set()

    def _set(self) -> None:
        is_due = self._clock() >= self._not_before or self._peak() > _GROWTH * self._peak_before
        first, second, third = self._thresholds
        gc.set_threshold(first, second, third if is_due else NOT_NOW)


_full_collections = FullCollections()
_holders: list[tuple[int, int, int]] = []
"""What was set before each block that runs."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the collector look rarely while the block runs, or any other such block of the process.

    Afterwards it is as it was, unless somebody else has set it meanwhile. What others have frozen stays so.
    """
    _holders.append(gc.get_threshold())
    first = _holders[0]
    if first[0] and len(_holders) == 1:
        _full_collections.begin(max(NEW_OBJECTS, first[0]), *first[1:])
    try:
        yield
    finally:
        first = _holders[0]
        _holders.pop()
        if not _holders:
            _full_collections.end()
            if gc.get_threshold()[0] == max(NEW_OBJECTS, first[0]):
                gc.set_threshold(*first)
