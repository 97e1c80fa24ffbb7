"""Advantages of a teacher: each token is worth what the teacher finds it likelier than the policy that sampled it.

The policy gradient of a token with advantage ``log teacher - log policy`` is on average that of minus the divergence of
the policy from the teacher, KL(policy || teacher), in that token's context: what it does to later contexts is left out,
as a discount of 0 does. Sources: Lu and Thinking Machines, "On-Policy Distillation" (2025); Gu et al., MiniLLM
(arXiv:2306.08543, section 2.2, "single-step decomposition"); slime's ``--use-opd`` adds it to other advantages.

Axes: N samples of a batch, R response tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollfeed.config.teacher import TeacherSettings, TeacherUse
from rollfeed.errors import RewardError, RunFailedError
from rollfeed.types import Advantages, Group, above_policy


def with_teacher(advantages_N: Advantages, groups: Sequence[Group], *, settings: TeacherSettings) -> Advantages:
    """Return the advantages with the teacher's, ``(R,)`` for each sample; as they are where it gives rewards only.

    Raises:
        RunFailedError: If a sample that is trained on has no log-probabilities of the teacher, or one is too large.
    """
    if settings.use is not TeacherUse.LOSS:
        return advantages_N
    samples = [sample for group in groups for sample in group.samples]
    rows = []
    for sample, own in zip(samples, advantages_N, strict=True):
        try:
            above = above_policy(sample) if sample.loss_mask.any() else np.zeros(sample.response_length)
        except RewardError as error:
            raise RunFailedError(
                f"{error}: it comes from a run without [teacher], or from a function of yours"
            ) from None
        row = settings.advantage_weight * np.asarray(own, np.float64) + settings.coefficient * above
        if not np.isfinite(row).all():
            raise RunFailedError(
                f"sample {sample.index} has a token whose advantage is not finite: the engine told no logprob of it"
            )
        rows.append(np.broadcast_to(row, sample.response_length).astype(np.float32))
    return tuple(rows)


def teacher_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return how far the policy is from its teacher in a batch; nothing where none has scored its samples."""
    samples = [sample for group in groups for sample in group.samples if sample.teacher_logprobs is not None]
    above = np.concatenate([np.empty(0), *(above_policy(each)[each.loss_mask != 0] for each in samples)])
    if not len(above):
        return {}
    return {
        #: rollout/teacher_kl: divergence of the policy from the teacher, KL(policy || teacher), in nats a trained token
        "rollout/teacher_kl": float(-above.mean()),
        #: rollout/teacher_kl_max: nats by which the policy finds one token likelier than the teacher does, at most
        "rollout/teacher_kl_max": float(-above.min()),
    }
