"""The trackers of a run, by name, and what all of them are told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from rollfeed.base.importing import is_async
from rollfeed.base.printing import keeping_prints
from rollfeed.base.waiting import call_in_own_thread
from rollfeed.config import TrackerName, TrackingSettings
from rollfeed.config.settings import flatten
from rollfeed.errors import ConfigError
from rollfeed.faults import name_of
from rollfeed.protocols import RunTracker, TrackedRun, Tracker
from rollfeed.tracking.sample_table import sample_rows
from rollfeed.tracking.tracker_thread import TrackerThread
from rollfeed.types import Group, TrainBatch

_CLASSES = {
    TrackerName.WANDB: "WandbTracker",
    TrackerName.TENSORBOARD: "TensorBoardTracker",
    TrackerName.MLFLOW: "MlflowTracker",
    TrackerName.TRACKIO: "TrackioTracker",
}
_NOT_OVERWRITING = frozenset({TrackerName.WANDB, TrackerName.MLFLOW, TrackerName.TRACKIO})
"""They keep every point that they were told, also of a step that is made anew."""
_WAIT_SECONDS, _WAIT_SECONDS_FAILED = 30.0, 5.0
"""At the end of a run, and of one that fails or is stopped, for all trackers together."""
_OWN = "plugins.tracker"
_NOT_TOLD = ("env", "slime_args")
"""Settings with values for other programs, in which there may be a key."""


class Trackers:
    """Those of the settings, and one of the user's; tells them from :meth:`following` on, without waiting.

    Raises:
        ConfigError: If the package of one is not installed, or the user's own is async.
    """

    def __init__(self, settings: TrackingSettings, *, reward_key: str | None, own: Tracker | None = None) -> None:
        self._settings = settings
        self._reward_key = reward_key
        self._own = own
        self._threads: list[TrackerThread] = []
        for method in ("start", "log", "log_samples", "close"):
            if is_async(getattr(own, method, None)):
                raise ConfigError(f"{_OWN}: {method} of {name_of(own)} is async, and nothing would await it: use def")
        for name in settings.trackers:
            found = find_spec(name)
            if found is None or found.origin is None:  # a folder of that name, as W&B leaves one
                raise ConfigError(
                    f"tracking.trackers: {name} is not installed: pip install 'rollfeed[{name}]', or leave it out"
                )

    @asynccontextmanager
    async def following(
        self, out: Path, *, tree: dict[str, Any], first_step: int, folder: Path, prints: Path
    ) -> AsyncIterator[None]:
        """Tell trackers of the run in the directory ``out`` in the block; what they print goes to a file.

        At the end they are waited for, half a minute at most; a cancellation ends this, too.

        ``first_step`` is the run's next one; what trackers keep is below ``folder``, and ``prints`` is the file.
        """
        if not self._settings.trackers and self._own is None:
            yield
            return
        run = self._run(out, tree, first_step=first_step, folder=folder)
        with keeping_prints(prints):
            self._threads = [self._thread(name, make, run) for name, make in self._makers()]
            seconds = _WAIT_SECONDS_FAILED
            try:
                yield
                seconds = _WAIT_SECONDS
            finally:
                threads, self._threads = self._threads, []
                await _end(threads, seconds)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Tell of an update or an evaluation."""
        self._log(dict(metrics), step=step)

    def log_batch(self, batch: TrainBatch) -> None:
        """Tell of a committed step, with samples where it is time for them."""
        if batch.step % self._settings.samples_interval == 0:
            self.log_samples(batch.groups, step=batch.step, name="samples", reward_key=self._reward_key)
        self._log(dict(batch.metrics), step=batch.step, next_step=batch.step + 1)

    def log_samples(self, groups: Sequence[Group], *, step: int, name: str, reward_key: str | None) -> None:
        """Show samples of groups."""
        if not self._threads:
            return
        rows = sample_rows(groups, count=self._settings.num_samples, reward_key=reward_key)

        def record(tracker: Any) -> None:
            tracker.log_samples(rows, step=step, name=name)

        for thread in self._threads if rows else ():
            if thread.takes_samples:
                thread.tell(record)

    def _log(self, metrics: Mapping[str, float], *, step: int, next_step: int | None = None) -> None:
        for thread in self._threads:
            thread.tell(lambda tracker: tracker.log(metrics, step=step), next_step=next_step)

    def _run(self, out: Path, tree: dict[str, Any], *, first_step: int, folder: Path) -> TrackedRun:
        return TrackedRun(
            name=self._settings.name or out.resolve().name,
            project=self._settings.project,
            group=self._settings.group,
            settings=flatten(_told(tree)),
            folder=folder,
            first_step=first_step,
        )

    def _makers(self) -> Iterator[tuple[str, Callable[[], Tracker]]]:
        for name in dict.fromkeys(self._settings.trackers):
            yield name.value, partial(_made, name)
        if (own := self._own) is not None:
            yield _OWN, lambda: own

    def _thread(self, name: str, make: Callable[[], Tracker], run: TrackedRun) -> TrackerThread:
        own, memory = replace(run, folder=run.folder / name), run.folder / f"{name}.json"
        told = f"tracker {name}" if self._own is None or name != _OWN else f"{_OWN} ({name_of(self._own)})"
        thread = TrackerThread(told, make, own, memory=memory, overwrites=name not in _NOT_OVERWRITING)
        thread.takes_samples = name != _OWN or isinstance(self._own, RunTracker)
        return thread


async def _end(threads: Sequence[TrackerThread], seconds: float) -> None:
    deadline = monotonic() + seconds

    def wait() -> None:
        for thread in threads:
            thread.wait(deadline - monotonic())

    for thread in threads:
        thread.end()
    try:
        await call_in_own_thread(wait, name="rollfeed-trackers-end")
    finally:
        for thread in threads:
            thread.leave()


def _told(value: Any) -> Any:
    """Return settings without those that may have a key in them."""
    if isinstance(value, dict):
        return {name: _told(each) for name, each in value.items() if name not in _NOT_TOLD}
    return [_told(each) for each in value] if isinstance(value, list) else value


def _made(name: TrackerName) -> Tracker:
    made: Tracker = getattr(import_module(f"rollfeed.tracking.{name}"), _CLASSES[name])()
    return made
