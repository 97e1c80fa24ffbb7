"""The time between two batches, by what it went into.

Invariant: every moment counts for one activity, so that all of them add up to the time that has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum, auto

import numpy as np

from rollfeed.types import Group, Rollout


class Activity(IntEnum):
    """An activity of a run; of several at once the first in this order counts."""

    PUBLISH = auto()
    """Weights go to the engine, or it is proved that it has them."""
    EVALUATE = auto()
    STORE = auto()
    TRAIN = auto()
    """Nobody asks for a batch: who took the last one trains on it."""
    GENERATE = auto()
    """Requests are at the engine."""
    SCORE = auto()
    WAIT = auto()
    """The rest: for weights, prompts, environments, tools and agents."""


class _Doing(AbstractContextManager[None]):
    """A block of an activity; thousands are under way at once, and a generator would be three objects."""

    __slots__ = ("_activity", "_clock")

    def __init__(self, clock: StepClock, activity: Activity) -> None:
        self._clock, self._activity = clock, activity

    def __enter__(self) -> None:
        self._clock.begin(self._activity)

    def __exit__(self, *exc_info: object) -> None:
        self._clock.end(self._activity)


class StepClock:
    """Measures activities; used by one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_doing = dict.fromkeys(Activity, 0) | {Activity.WAIT: 1}
        self._seconds = dict.fromkeys(Activity, 0.0)
        self._began = self._now = clock()
        self._current = Activity.WAIT

    def doing(self, activity: Activity) -> AbstractContextManager[None]:
        """Count a block's time for an activity, unless another goes before it."""
        return _Doing(self, activity)

    @contextmanager
    def interrupting(self, activity: Activity) -> Iterator[None]:
        """Leave an activity that goes on for as long as the block takes."""
        self.end(activity)
        try:
            yield
        finally:
            self.begin(activity)

    def begin(self, activity: Activity) -> None:
        """Begin an activity; it may be going on already."""
        self._num_doing[activity] += 1
        if activity < self._current:
            self._pass_time()
            self._current = activity

    def end(self, activity: Activity) -> None:
        """End what one call of :meth:`begin` has begun."""
        self._num_doing[activity] -= 1
        if activity is self._current and not self._num_doing[activity]:
            self._pass_time()
            self._current = next(each for each, count in self._num_doing.items() if count)

    def take(self, groups: Sequence[Group] = ()) -> dict[str, float]:
        """Return as metrics the seconds of all activities since the last call, or the beginning.

        ``groups`` are those of the batch; how long it took to answer is among the metrics then.
        """
        self._pass_time()
        seconds = {each.name.lower(): value for each, value in self._seconds.items()}
        self._seconds = dict.fromkeys(Activity, 0.0)
        return {
            #: time/unix_seconds: when the batch was cut, in seconds since 1970 (UTC)
            "time/unix_seconds": time.time(),
            #: time/run_seconds: the same in seconds since this process began with the run
            "time/run_seconds": self._now - self._began,
            #: time/total_seconds: from the cut of the batch before, or the beginning: the sum of those that follow
            "time/total_seconds": sum(seconds.values()),
            #: time/publish_seconds: of the total, in which weights were published and proved
            #: time/evaluate_seconds: in which the policy was evaluated
            #: time/store_seconds: in which the batch before was stored
            #: time/train_seconds: in which nobody asked for a batch, as the one before was trained on
            #: time/generate_seconds: of the rest, in which a request was at the engine
            #: time/score_seconds: in which answers were scored, and none was generated
            #: time/wait_seconds: in which nothing of this went on: for weights, prompts, environments, tools and agents
            **{f"time/{name}_seconds": value for name, value in seconds.items()},
            **_latencies([rollout for group in groups for rollout in group.rollouts]),
        }

    def _pass_time(self) -> None:
        now = self._clock()
        self._seconds[self._current] += now - self._now
        self._now = now


def _latencies(rollouts: Sequence[Rollout]) -> dict[str, float]:
    if not rollouts:
        return {}
    p50, p90, p99 = np.percentile([rollout.seconds for rollout in rollouts], (50, 90, 99)).tolist()
    #: time/latency_p50, time/latency_p90, time/latency_p99: percentiles of the seconds that a rollout took, unscored
    return {"time/latency_p50": p50, "time/latency_p90": p90, "time/latency_p99": p99}
