"""The cut of a run's batches, made from its settings."""

from __future__ import annotations

from functools import partial

from rollfeed.app.checks import needs_keyed_cut
from rollfeed.batch import AgeLimit, OverlongPenalty, cut_batch, equal_advantages
from rollfeed.config import RolloutConfig, RolloutMode, StalenessPolicy
from rollfeed.protocols import AdvantageFn, BatchCutter
from rollfeed.rewards.results import KeyedCut


def batch_cutter(config: RolloutConfig, advantage_fn: AdvantageFn | None) -> BatchCutter:
    """Return what cuts batches as the settings say; ``advantage_fn`` is a function of the user's."""
    reward, overlong = config.reward, None
    if config.rollout.mode is RolloutMode.SFT:
        advantage_fn = equal_advantages
    if reward.overlong is not None:
        length = reward.overlong.length or config.sampling.rollout_max_response_len
        overlong = OverlongPenalty(length=length, cache=reward.overlong.cache, factor=reward.overlong.factor)
    cut = partial(
        cut_batch,
        age_rule=age_limit(config),
        reward_key=reward.reward_key,
        estimator=config.advantage,
        advantage_fn=advantage_fn,
        overlong=overlong,
        mask_truncated=config.rollout.mask_truncated,
        teacher=config.teacher,
    )
    return KeyedCut(cut, reward_key=str(reward.reward_key)) if needs_keyed_cut(config) else cut


def age_limit(config: RolloutConfig) -> AgeLimit:
    """Return what holds the limit on staleness."""
    return AgeLimit(max_staleness=config.rollout.max_staleness, policy=config.rollout.staleness_policy)


def surplus_rule(config: RolloutConfig) -> AgeLimit:
    """Return what holds it for groups that were finished in earlier steps."""
    if config.rollout.mask_offpolicy_in_partial_rollout and config.rollout.mode is not RolloutMode.ASYNC:
        return AgeLimit(max_staleness=0, policy=StalenessPolicy.MASK)
    return age_limit(config)
