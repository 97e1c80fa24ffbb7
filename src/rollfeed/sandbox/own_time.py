"""The time that a program itself has taken, whatever else the machine does meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable

from rollfeed.sandbox.usage import family, status_words

_TICKS = os.sysconf("SC_CLK_TCK")


class OwnClock:
    """Counts the time of a program and of all that it starts: on cores, and asleep, but not waiting for a core.

    :meth:`tick` is called several times a second, and looks once: a program that wants a core has taken what it has
    been on one, one that sleeps what has passed, but no more than ``most_asleep`` seconds, as a call that comes late
    comes late because the machine is busy.
    """

    def __init__(self, pid: int, *, now: float, most_asleep: float, used: Callable[[], float] | None = None) -> None:
        self.seconds = 0.0
        """Taken."""
        self.cpu_seconds = 0.0
        """On cores, of all processes together."""
        self._pid = pid
        self._used = used or (lambda: family_cpu_seconds(pid))
        self._most_asleep = most_asleep
        self._last, self._first_used = now, self._used()

    def tick(self, now: float) -> None:
        """Look at the program."""
        used = max(0.0, self._used() - self._first_used - self.cpu_seconds)
        passed, self._last = now - self._last, now
        self.cpu_seconds += used
        waited = 0.0 if wants_core(self._pid) else min(passed, self._most_asleep)
        self.seconds += max(min(used, passed), waited)


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
