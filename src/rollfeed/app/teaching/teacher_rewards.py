"""Rewards of a teacher, which has scored the samples before anything else does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollfeed.config.teacher import Reduction, TeacherSettings, TeacherUse
from rollfeed.errors import RewardError
from rollfeed.protocols import Scorer
from rollfeed.rewards.hub import RewardHub
from rollfeed.types import Outcome, Prompt, Rollout, Verdict, above_policy

BY_TEACHER = "the teacher's"
"""What a verdict says in detail of a reward that is the teacher's."""


@dataclass(frozen=True, slots=True)
class TaughtScorer(Scorer):
    """Scores as ``hub`` does, with rewards of the teacher in place of the hub's or where that has none.

    With ``use = "reward"`` every reward is the teacher's; whether an answer is right stays what the hub says of prompts
    that it can score, and what it fails to score has failed. With ``use = "loss"`` only prompts that nothing scores
    have the teacher's.
    """

    hub: RewardHub
    settings: TeacherSettings

    def scores_alone(self, rollout: Rollout, prompt: Prompt) -> bool:
        return self.hub.scores_alone(rollout, prompt)

    async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
        is_given = any(sample.reward is not None for rollout in rollouts for sample in rollout.samples)
        if not (is_given or self.hub.has_scorer(prompt)):
            return [self._taught(rollout, Verdict(reward=0.0)) for rollout in rollouts]
        verdicts = await self.hub.score(rollouts, prompt)
        if self.settings.use is TeacherUse.LOSS:
            return verdicts
        return [self._taught(rollout, verdict) for rollout, verdict in zip(rollouts, verdicts, strict=True)]

    def _taught(self, rollout: Rollout, verdict: Verdict) -> Verdict:
        """Return the verdict with the teacher's reward."""
        if not rollout.has_finished:
            return Verdict.failed(f"not scored: the rollout is {rollout.status.value}")
        if verdict.outcome is not Outcome.OK:
            return verdict
        try:
            above = np.concatenate([above_policy(each)[each.loss_mask != 0] for each in rollout.samples])
        except RewardError as error:
            return Verdict.failed(str(error))
        total = float(above.sum())
        if not np.isfinite(total):
            return Verdict.failed("the engine told no logprobs of what it has sampled, to compare the teacher's with")
        scale = self.settings.coefficient / (max(1, len(above)) if self.settings.reduction is Reduction.MEAN else 1)
        return replace(verdict, reward=scale * total, detail=verdict.detail or BY_TEACHER)
