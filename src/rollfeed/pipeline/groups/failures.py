"""The failure budget: which share of the last rollouts may fail before the run stops with the first cause.

Invariant: what is committed depends on the groups that were decided, not on the order in which rollouts ended.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rollfeed.config import RolloutSettings
from rollfeed.errors import RunFailedError

_log = logging.getLogger(__name__)
_NUM_SHOWN = 3


class _Failure(NamedTuple):
    where: str
    cause: str

    @property
    def kind(self) -> str:
        """The cause, numbers apart."""
        return re.sub(r"\d+", "#", self.cause)

    def told(self, count: int) -> str:
        alike = f" (and {count - 1} more like it)" if count > 1 else ""
        return f"{self.where}: {self.cause}{alike}"


_BEFORE = _Failure("", "")
"""In an earlier process."""


class FailureBudget:
    """Counts how rollouts end; too many failures among the last of them end the run.

    Args:
        settings: ``failure_budget``, ``failure_window`` and ``failure_minimum`` count here.
        settled: Outcomes of earlier processes, the oldest first; True ended well.
    """

    def __init__(self, settings: RolloutSettings, *, settled: Sequence[bool] = ()) -> None:
        self._share = settings.failure_budget
        self._minimum = settings.failure_minimum
        self._settled = deque(settled, maxlen=settings.failure_window)
        self._last = deque((None if ended_well else _BEFORE for ended_well in settled), maxlen=settings.failure_window)
        self._open: defaultdict[int, list[bool]] = defaultdict(list)
        """Outcomes of groups that are not decided, by group index."""
        self._untold: list[_Failure] = []

    def succeed(self, group_index: int) -> None:
        """Count a rollout that ended well."""
        self._last.append(None)
        self._open[group_index].append(True)

    def fail(self, group_index: int, cause: str, *, where: str) -> None:
        """Count a failure.

        ``cause`` is the same, numbers apart, for failures of one kind.

        Raises:
            RunFailedError: If that was one more than the budget allows; it names the first cause.
        """
        failure = _Failure(where, cause)
        self._last.append(failure)
        self._open[group_index].append(False)
        self._untold.append(failure)
        failures = [each for each in self._last if each is not None]
        if len(failures) < self._minimum or len(failures) <= self._share * len(self._last):
            return
        first = next(each for each in failures if each is not _BEFORE)
        self._untold = [each for each in self._untold if each.kind != first.kind]
        self.report()
        raise RunFailedError(
            f"{len(failures)} of the last {len(self._last)} rollouts failed, more than rollout.failure_budget = "
            f"{self._share:g} of them; the first one: {first.told(sum(each.kind == first.kind for each in failures))}"
        )

    def settle(self, decided: Iterable[int], *, in_flight: Iterable[int] = ()) -> tuple[bool, ...]:
        """Return the outcomes to commit, now that some groups are decided; those not in flight are forgotten."""
        for group_index in sorted(decided):
            self._settled.extend(sorted(self._open.pop(group_index, ())))
        for group_index in self._open.keys() - set(in_flight):
            del self._open[group_index]
        return tuple(self._settled)

    def report(self) -> None:
        """Log the failures since the last call, one line a cause."""
        for line in _lines(self._untold):
            _log.warning("%s", line)
        self._untold = []


def _lines(failures: Sequence[_Failure]) -> Iterator[str]:
    counts = Counter(failure.kind for failure in failures)
    first = {failure.kind: failure for failure in reversed(failures)}
    for kind, count in counts.most_common(_NUM_SHOWN):
        yield f"rollout failed: {first[kind].told(count)}"
    if len(counts) > _NUM_SHOWN:
        rest = [count for _, count in counts.most_common()[_NUM_SHOWN:]]
        yield f"{sum(rest)} more rollouts failed, for {len(rest)} other causes"
