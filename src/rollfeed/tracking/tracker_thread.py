"""A tracker in a thread of its own, from which nothing comes back to the run: no error, and no waiting.

Invariant: what a tracker was to be told it has taken, or it is counted as lost; the count is said at the end.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from rollfeed.base.atomic import replace_file
from rollfeed.base.printing import users_printing
from rollfeed.faults import describe
from rollfeed.protocols import RunTracker, TrackedRun, Tracker

_log = logging.getLogger(__name__)
_MAX_WAITING = 1000
"""Records that a tracker may be behind by; later ones are lost to it."""

Record = Callable[[Tracker], None]
"""Tells a tracker something."""


class TrackerThread:
    """Tells one tracker of a run, and keeps in a file how far it was told, for a process that goes on.

    ``name`` is for people. ``make`` makes the tracker, in the thread: importing one takes seconds. One that
    ``overwrites`` no steps begins another run where steps are made anew.
    """

    def __init__(
        self, name: str, make: Callable[[], Tracker], run: TrackedRun, *, memory: Path, overwrites: bool
    ) -> None:
        self.takes_samples = True
        self._name = name
        self._make = make
        self._memory = memory
        self._run = _going_on(run, memory, overwrites=overwrites)
        self._run_id = ""
        self._tracker: Tracker | None = None
        self._records: SimpleQueue[tuple[Record, int | None] | None] = SimpleQueue()
        self._num_told, self._num_taken = 0, 0
        self._error: str | None = None
        self._is_left = False
        self._thread = threading.Thread(target=self._work, name=f"rollfeed-tracker-{name}", daemon=True)
        self._thread.start()

    def tell(self, record: Record, *, next_step: int | None = None) -> None:
        """Have something recorded, after all before it; with ``next_step`` it is the last that a batch needs."""
        self._num_told += 1
        if self._records.qsize() < _MAX_WAITING:
            self._records.put((record, next_step))

    def end(self) -> None:
        """Have the tracker closed when it has been told all that waits."""
        self._records.put(None)

    def wait(self, seconds: float) -> None:
        """Wait for the end at most so long."""
        self._thread.join(max(0.0, seconds))

    def leave(self) -> None:
        """Say what the tracker does not have; from now on nothing is said or kept of it."""
        self._is_left = self._thread.is_alive()
        num_lost = self._num_told - self._num_taken
        if num_lost:
            why = " (it has not answered in time)" if self._error is None else ""
            _log.warning("%s: %d of %d records are not in it%s", self._name, num_lost, self._num_told, why)
        elif self._is_left:
            _log.warning("%s: it was not closed in time; the last records may be missing in it", self._name)

    def _work(self) -> None:
        with users_printing():
            self._try(self._begun)
            while (waiting := self._records.get()) is not None:
                record, next_step = waiting
                if self._try(lambda record=record: record(self._begun())):  # type: ignore[misc]
                    self._num_taken += 1
                    if next_step is not None:
                        self._try(lambda next_step=next_step: self._remember(next_step))  # type: ignore[misc]
            if self._tracker is not None:
                self._try(self._tracker.close)

    def _begun(self) -> Tracker:
        """Return the tracker; one that could not begin is made and begun again."""
        if self._tracker is None:
            tracker = self._make()
            if isinstance(tracker, RunTracker):
                self._run_id = tracker.start(self._run)
            self._tracker = tracker
            self._remember(self._run.first_step)
        return self._tracker

    def _try(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except BaseException as error:  # native extensions raise what is no Exception
            if self._error is None and not self._is_left:
                self._error = describe(error, self._tracker)
                _log.warning("%s: %s; the run goes on", self._name, self._error)
            return False
        return True

    def _remember(self, next_step: int) -> None:
        text = json.dumps({"run": self._run_id, "next_step": next_step})
        if not self._is_left:
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._memory, lambda file: file.write(text.encode()))


def _going_on(run: TrackedRun, memory: Path, *, overwrites: bool) -> TrackedRun:
    """Return the run with what an earlier process has left in the file."""
    try:
        stored = json.loads(memory.read_text(encoding="utf-8"))
        run_id, next_step = str(stored["run"]), int(stored["next_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return run
    went_back = run.first_step < next_step
    if went_back and not overwrites:
        return replace(run, name=f"{run.name}-from-{run.first_step}", went_back=True)
    return replace(run, going_on=run_id, went_back=went_back)
