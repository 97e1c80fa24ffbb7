"""Cutting a batch: groups that are new enough, in order, their advantages, and the numbers that describe it.

Invariant: no token that is trained on is staler than allowed, against the version that the batch is stamped with,
whatever made the groups.

Axes: S samples of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollfeed.batch.advantages import batch_advantages, with_added
from rollfeed.batch.guard_rails import guard_rails
from rollfeed.batch.teacher_advantages import teacher_metrics, with_teacher
from rollfeed.config import StalenessPolicy
from rollfeed.config.advantage import AdvantageSettings
from rollfeed.config.teacher import TeacherSettings
from rollfeed.protocols import REWRITTEN_TURNS, AdvantageFn, AgeRule
from rollfeed.types import (
    STALE,
    BatchCut,
    ByAge,
    Correct,
    Dropped,
    Group,
    Requeued,
    Rollout,
    Sample,
    SampleStatus,
    TrainBatch,
)

_TRUNCATED = SampleStatus.TRUNCATED


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeLimit:
    """Fits :class:`rollfeed.protocols.AgeRule`.

    A group that masking would leave without a token to train on is answered again: it would fill a place in the batch
    and teach nothing.
    """

    max_staleness: int | None
    """How many versions a token that is trained on may be behind; None for any number."""
    policy: StalenessPolicy

    def __call__(self, groups: Sequence[Group], *, policy_version: int) -> ByAge:
        if self.max_staleness is None:
            return ByAge(fresh=tuple(groups))
        oldest_allowed = policy_version - self.max_staleness
        fresh: list[Group] = []
        old: list[Dropped | Requeued] = []
        masked_tokens = 0
        for group in groups:
            oldest = group.oldest_trained_version
            if oldest is None or oldest >= oldest_allowed:
                fresh.append(group)
            elif self.policy is StalenessPolicy.DROP:
                old.append(Dropped(group, STALE))
            elif (
                self.policy is StalenessPolicy.MASK
                and (left := group.without_versions_before(oldest_allowed)).trained_tokens
            ):
                fresh.append(left)
                masked_tokens += group.trained_tokens - left.trained_tokens
            else:
                old.append(Requeued(group, STALE))
        return ByAge(fresh=tuple(fresh), old=tuple(old), masked_tokens=masked_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPenalty:
    """Soft Overlong Punishment of DAPO (arXiv:2503.14476, section 3.4, equation 13)."""

    length: int
    """L_max: response tokens, inserted ones included, from which on the whole penalty is taken."""
    cache: int
    """L_cache: tokens before that over which it grows."""
    factor: float = 1.0
    """The whole penalty; 1 in the paper."""

    def __call__(self, sample: Sample) -> float:
        """Return what is added to the sample's reward: 0 up to ``length - cache`` tokens, then falling to -factor."""
        over = sample.response_length - (self.length - self.cache)
        return -self.factor * min(over / self.cache, 1.0) if over > 0 else 0.0

    def of(self, groups: Sequence[Group]) -> NDArray[np.float64]:
        """Return the penalty of every sample. ``(S,)``."""
        return np.array([self(sample) for group in groups for sample in group.samples], np.float64)


def cut_batch(
    groups: Sequence[Group],
    *,
    step: int,
    policy_version: int,
    age_rule: AgeRule,
    reward_key: str | None,
    estimator: AdvantageSettings,
    advantage_fn: AdvantageFn | None = None,
    overlong: OverlongPenalty | None = None,
    mask_truncated: bool = False,
    teacher: TeacherSettings | None = None,
) -> BatchCut | ByAge:
    """Return the batch of a step, groups ordered by index; or, if some are too old for it, which.

    ``advantage_fn`` takes the place of the estimator. ``overlong`` is what long responses lose of their reward before
    that; ``mask_truncated`` leaves truncated answers out of the loss, not out of baselines. ``teacher`` says what its
    log-probabilities add.

    Raises:
        RunFailedError: As :func:`batch_advantages`.
    """
    by_age = age_rule(groups, policy_version=policy_version)
    if by_age.old:
        return by_age
    ordered = tuple(sorted(by_age.fresh, key=lambda group: group.group_index))
    num_removed = _num_removed(ordered)
    if mask_truncated:
        ordered = tuple(_without_truncated(group) for group in ordered)
    penalties_S = None if overlong is None else overlong.of(ordered)
    rewarded = ordered if penalties_S is None else with_added(ordered, penalties_S, reward_key=reward_key)
    metrics = batch_metrics(ordered, reward_key=reward_key, policy_version=policy_version)
    if penalties_S is not None:
        #: rollout/overlong_penalty_mean: mean penalty of long responses, where `[reward.overlong]` is set
        metrics["rollout/overlong_penalty_mean"] = float(penalties_S.mean())
        #: rollout/overlong_ratio: share of samples with such a penalty
        metrics["rollout/overlong_ratio"] = float((penalties_S < 0).mean())
    if mask_truncated:
        #: rollout/truncated_masked: samples left out of the loss by `rollout.mask_truncated`
        metrics["rollout/truncated_masked"] = float(_num_removed(ordered) - num_removed)
    advantages_S = batch_advantages(rewarded, settings=estimator, function=advantage_fn, reward_key=reward_key)
    if teacher is not None:
        advantages_S = with_teacher(advantages_S, ordered, settings=teacher)
        metrics |= teacher_metrics(ordered)
    batch = TrainBatch(
        step=step,
        policy_version=policy_version,
        groups=ordered,
        advantages_S=advantages_S,
        penalties_S=None if penalties_S is None else penalties_S.astype(np.float32),
        metrics=metrics,
    )
    return BatchCut(batch=batch, masked_tokens=by_age.masked_tokens)


def _num_removed(groups: Sequence[Group]) -> int:
    return sum(sample.remove_sample for group in groups for sample in group.samples)


def _without_truncated(group: Group) -> Group:
    """Return the group with the samples of truncated answers marked as not to be trained on."""

    def kept(rollout: Rollout) -> Rollout:
        is_cut = rollout.status is _TRUNCATED
        samples = [
            replace(sample, remove_sample=True) if is_cut or sample.status is _TRUNCATED else sample
            for sample in rollout.samples
        ]
        return replace(rollout, samples=tuple(samples))

    return replace(group, rollouts=tuple(kept(rollout) for rollout in group.rollouts))


def batch_metrics(groups: Sequence[Group], *, reward_key: str | None, policy_version: int) -> dict[str, float]:
    """Return what a batch looks like, as flat ``rollout/...`` numbers; empty responses are legal."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.concatenate([group.reward_values(reward_key) for group in groups])
    lengths = np.array([rollout.response_tokens for rollout in rollouts], np.float64)
    samples = [sample for group in groups for sample in group.samples]
    ages = [policy_version - v for sample in samples if (v := sample.oldest_trained_version) is not None]
    metrics = {
        #: rollout/reward_mean: mean reward of the rollouts
        "rollout/reward_mean": float(rewards.mean()),
        #: rollout/reward_std: standard deviation over all rollouts
        "rollout/reward_std": float(rewards.std()),
        #: rollout/group_reward_std: mean over the groups of the standard deviation within one
        "rollout/group_reward_std": float(np.mean([group.reward_values(reward_key).std() for group in groups])),
        #: rollout/response_length_mean: tokens of a response, as those that follow
        "rollout/response_length_mean": float(lengths.mean()),
        #: rollout/response_length_min: shortest response
        "rollout/response_length_min": float(lengths.min()),
        #: rollout/response_length_max: longest response
        "rollout/response_length_max": float(lengths.max()),
        #: rollout/truncated_ratio: share of responses that ended at their length limit
        "rollout/truncated_ratio": float(np.mean([r.status is SampleStatus.TRUNCATED for r in rollouts])),
        #: rollout/empty_ratio: share of responses without a token
        "rollout/empty_ratio": float((lengths == 0).mean()),
        #: rollout/groups_untrained: groups of the batch without a trained token
        "rollout/groups_untrained": float(sum(group.trained_tokens == 0 for group in groups)),
        #: rollout/trained_tokens: sum of the weights of response tokens, without samples that are left out of the loss
        "rollout/trained_tokens": float(sum(sample.loss_mask.sum() for sample in samples if not sample.remove_sample)),
        #: rollout/staleness_max: versions between the batch and the oldest trained token of a sample, at most
        "rollout/staleness_max": float(max(ages, default=0)),
        #: rollout/staleness_mean: the same on average
        "rollout/staleness_mean": float(np.mean(ages)) if ages else 0.0,
        #: rollout/several_versions_ratio: share of samples that several versions of the policy made
        "rollout/several_versions_ratio": float(np.mean([len(sample.version_spans) > 1 for sample in samples])),
        #: rollout/resumed_ratio: share of samples that went on after they were interrupted
        "rollout/resumed_ratio": float(np.mean(["start_rollout_id" in sample.metadata for sample in samples])),
        #: rollout/rewritten_turns: turns after which the chat template showed earlier ones otherwise
        "rollout/rewritten_turns": float(sum(sample.metadata.get(REWRITTEN_TURNS, 0) for sample in samples)),
    }
    metrics |= guard_rails(groups, reward_key=reward_key)
    metrics |= _percentiles(rewards, lengths) | _episode_metrics(rollouts) | _source_metrics(groups, reward_key)
    #: rollout/correct_ratio: share of right answers among those that a grader calls right or wrong
    return metrics | _correct_ratio("rollout/correct_ratio", rollouts)


def _percentiles(rewards: NDArray[np.float64], lengths: NDArray[np.float64]) -> dict[str, float]:
    """Return percentiles of a batch's rollouts; both arrays have one number a rollout."""
    numbers = {
        #: rollout/reward_p10, rollout/reward_p50, rollout/reward_p90: percentiles over all rollouts
        "rollout/reward": (rewards, (10, 50, 90)),
        #: rollout/response_length_p50, rollout/response_length_p90, rollout/response_length_p99: of the tokens
        "rollout/response_length": (lengths, (50, 90, 99)),
    }
    return {
        f"{name}_p{percent}": float(value)
        for name, (values, percents) in numbers.items()
        for percent, value in zip(percents, np.percentile(values, percents), strict=True)
    }


def _source_metrics(groups: Sequence[Group], reward_key: str | None) -> dict[str, float]:
    """Return the numbers of each source of prompts that the batch has groups of."""
    by_source: dict[str, list[Group]] = {}
    for group in groups:
        by_source.setdefault(group.prompt.source, []).append(group)
    metrics: dict[str, float] = {}
    for source, its in sorted(by_source.items()):
        rewards = np.concatenate([group.reward_values(reward_key) for group in its])
        metrics |= {
            #: sources/<source>/groups: groups of the batch
            f"sources/{source}/groups": float(len(its)),
            #: sources/<source>/reward_mean: mean reward of their rollouts
            f"sources/{source}/reward_mean": float(rewards.mean()),
        }
        #: sources/<source>/correct_ratio: share of right answers, as `rollout/correct_ratio`
        rollouts = [rollout for group in its for rollout in group.rollouts]
        metrics |= _correct_ratio(f"sources/{source}/correct_ratio", rollouts)
    return metrics


def _correct_ratio(name: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    verdicts = [rollout.verdict.correct for rollout in rollouts if rollout.verdict is not None]
    judged = [correct is Correct.YES for correct in verdicts if correct is not Correct.UNDEFINED]
    return {name: float(np.mean(judged))} if judged else {}


def _episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return what the metadata of last samples say of their episodes; nothing where there are none."""
    told = [rollout.samples[-1].metadata for rollout in rollouts if rollout.samples]
    names = {
        #: rollout/turns_mean: turns of the policy in an episode, where there are episodes
        "num_turns": "rollout/turns_mean",
        #: rollout/tool_calls_mean: calls of tools in an episode with tools
        "num_tool_calls": "rollout/tool_calls_mean",
        #: rollout/tool_calls_failed_mean: those of them that could not be made, or gave no answer
        "num_failed_tool_calls": "rollout/tool_calls_failed_mean",
    }
    counts = {name: [value for each in told if type(value := each.get(key)) is int] for key, name in names.items()}
    return {name: float(np.mean(values)) for name, values in counts.items() if values}
