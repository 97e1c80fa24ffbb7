"""The time that a program itself has taken, whatever else the machine does meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable

from rollfeed.sandbox.usage import family, status_words

_TICKS = os.sysconf("SC_CLK_TCK")


class OwnClock:
    """Counts the time of a program and of all that it starts: on cores, and asleep, but not waiting for a core.

    :meth:`tick` is to be called every ``looks_every`` seconds, and looks once: a program that wants a core has taken
    what it has been on one, one that sleeps what has passed. Of a call that comes late, because the machine is busy,
    only ``looks_every`` counts as sleep: the program may have waited for us.
    """

    def __init__(self, pid: int, *, now: float, looks_every: float, used: Callable[[], float] | None = None) -> None:
        self.seconds = 0.0
        """Taken."""
        self.cpu_seconds = 0.0
        """On cores, of all processes together."""
        self._pid = pid
        self._used = used or (lambda: family_cpu_seconds(pid))
        self._looks_every = looks_every
        self._last, self._first_used = now, self._used()

    def tick(self, now: float) -> None:
        """Look at the program."""
        used = max(0.0, self._used() - self._first_used - self.cpu_seconds)
        passed, self._last = now - self._last, now
        self.cpu_seconds += used
        asleep = passed if passed < 2 * self._looks_every else self._looks_every
        self.seconds += max(min(used, passed), 0.0 if wants_core(self._pid) else asleep)


def family_cpu_seconds(pid: int) -> float:
    """Return the time on cores of a process, its descendants, and those of them that were waited for."""
    ticks = 0
    for member in family(pid):
        if words := status_words(f"/proc/{member}/stat"):
            ticks += sum(int(word) for word in words[11:15])
    return ticks / _TICKS


def wants_core(pid: int) -> bool:
    """Return whether a thread of a process or of a descendant is on a core, or could be."""
    return any(_wants_core(member) for member in family(pid))


def _wants_core(pid: int) -> bool:
    words = status_words(f"/proc/{pid}/stat")
    if not words or words[0] == "R" or words[17] == "1":
        return bool(words) and words[0] == "R"
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any(status_words(f"/proc/{pid}/task/{thread}/stat")[:1] == ["R"] for thread in threads)
