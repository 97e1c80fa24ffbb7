"""Says what a step is waiting for when nothing has finished for a while, and who lets nothing else run."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from rollfeed.faults import innermost_line

_log = logging.getLogger(__name__)


class LoopWatch:
    """A thread that logs, after every ``seconds`` in which the event loop was held up, which line holds it up.

    A context manager, entered in the loop. What holds Python's lock as well is told when it gives that back.
    """

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds
        self._has_ended = threading.Event()

    def __enter__(self) -> None:
        arguments = (asyncio.get_running_loop(), threading.get_ident())
        threading.Thread(target=self._watch, args=arguments, name="rollfeed-watchdog", daemon=True).start()

    def __exit__(self, *exc_info: object) -> None:
        self._has_ended.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        while not self._has_ended.wait(self._seconds):
            answered, asked = threading.Event(), time.monotonic()
            try:
                loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop has closed
                return
            while not answered.wait(self._seconds):
                if self._has_ended.is_set():
                    return
                _log.warning(
                    "for %.0f s nothing else has run, Ctrl-C neither: %s holds up the event loop; have it awaited, or "
                    "called in a thread (asyncio.to_thread)",
                    time.monotonic() - asked,
                    innermost_line(sys._current_frames().get(thread)),
                )


class Watchdog:
    """Calls ``report`` with one sentence after every ``quiet_seconds`` without a sign of life.

    An async context manager; between entering and leaving it holds one timer and no task.
    """

    def __init__(self, *, quiet_seconds: float, describe: Callable[[], str], report: Callable[[str], None]) -> None:
        self._quiet_seconds = quiet_seconds
        self._describe = describe
        self._report = report
        self._timer: asyncio.TimerHandle | None = None
        self._last_sign = 0.0

    async def __aenter__(self) -> Watchdog:
        self._loop = asyncio.get_running_loop()
        self._last_sign = self._loop.time()
        self._arm()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def sign_of_life(self) -> None:
        """Something has finished; start counting anew."""
        self._last_sign = self._loop.time()

    def _arm(self) -> None:
        self._timer = self._loop.call_later(self._quiet_seconds, self._look)

    def _look(self) -> None:
        quiet = self._loop.time() - self._last_sign
        if quiet >= self._quiet_seconds:
            self._report(f"nothing has finished for {quiet:.0f} s; waiting for {self._describe()}")
        self._arm()


def describe_phases(phases: Mapping[int, str], *, num_at_engine: int) -> str:
    """Return which groups are in which phase, the oldest by name."""
    if not phases:
        return "the rollout function or the prompt source"
    told = [f"{count} {phase}" for phase, count in sorted(Counter(phases.values()).items())]
    oldest = min(phases)
    return (
        f"{len(phases)} groups ({', '.join(told)}), the oldest is group {oldest} ({phases[oldest]}); "
        f"{num_at_engine} requests are at the engine"
    )
