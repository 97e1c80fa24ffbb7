"""Several judges of the same responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Any

from rollfeed.base.waiting import all_at_once
from rollfeed.config.judge import Combine, JudgeSettings
from rollfeed.rewards.judging.counts import JudgeCounts
from rollfeed.rewards.judging.judge import Judge
from rollfeed.types import Outcome, Verdict

_EQUAL = 1e-9
_COMBINE: Mapping[Combine, Callable[[Sequence[float]], float]] = {
    Combine.MEAN: fmean,
    Combine.MEDIAN: median,
    Combine.MIN: min,
}


class Panel:
    """Asks all its judges, and makes one score of theirs; without a verdict of each there is none."""

    def __init__(self, settings: JudgeSettings, judges: Sequence[Judge], *, counts: JudgeCounts) -> None:
        self._combine = _COMBINE[settings.combine]
        self.judges = judges
        self._counts = counts

    @property
    def compares_group(self) -> bool:
        """Whether it needs all responses to a prompt: :meth:`compare`."""
        return self.judges[0].compares_group

    def problem(self, label: Any, metadata: Mapping[str, Any]) -> str | None:
        """Fits :data:`rollfeed.rewards.labels.LabelProblem`."""
        return next((found for judge in self.judges if (found := judge.problem(label, metadata))), None)

    async def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        return self._together(await all_at_once(judge(response, label, metadata) for judge in self.judges))

    async def compare(self, responses: Sequence[str], label: Any, metadata: Mapping[str, Any]) -> list[Verdict]:
        """Return one verdict a response, in order, as :meth:`Judge.compare`."""
        by_judge = await all_at_once(judge.compare(responses, label, metadata) for judge in self.judges)
        return [self._together(verdicts) for verdicts in zip(*by_judge, strict=True)]

    def _together(self, verdicts: Sequence[Verdict]) -> Verdict:
        failed = next((each for each in verdicts if each.outcome is not Outcome.OK), None)
        if failed is not None:
            return failed
        scores = [float(each.reward) for each in verdicts if isinstance(each.reward, float)]
        self._counts.panel_agreements += [abs(one - other) <= _EQUAL for one, other in combinations(scores, 2)]
        told = zip(self.judges, scores, verdicts, strict=True)
        detail = "\n".join(f"{judge.name} gives {score:g}: {each.detail}" for judge, score, each in told)
        return Verdict(reward=self._combine(scores), detail=detail)
