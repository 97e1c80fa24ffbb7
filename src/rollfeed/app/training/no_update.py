"""Why a batch has changed nothing, and what helps when that goes on."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np

from rollfeed.config import Settings
from rollfeed.types import Correct, TrainBatch, are_equal

_log = logging.getLogger(__name__)

EQUAL_REWARDS = "all groups had equal rewards"
_FIRST_WARNING, _LATER_WARNINGS = 3, 10
"""Batches in a row after which it is said, and how many lie between two later warnings."""


def why_no_update(batch: TrainBatch, *, reward_key: str | None, otherwise: str) -> str:
    """Return why a batch brought no update; ``otherwise`` where its rewards and masks do not say."""
    if not any(sample.loss_mask.any() and not sample.remove_sample for sample in batch.samples):
        return "no token of the batch is trained on"
    if any(map(np.any, batch.advantages_S)):
        return otherwise
    is_equal = all(are_equal(group.reward_values(reward_key)) for group in batch.groups)
    return EQUAL_REWARDS if is_equal else "every advantage is 0"


def warn_of_equal_rewards(num_in_a_row: int, batch: TrainBatch, settings: Settings) -> None:
    """Say what helps when several batches in a row had nothing but equal rewards."""
    since = num_in_a_row - _FIRST_WARNING
    if since < 0 or since % _LATER_WARNINGS:
        return
    remedies = []
    if not any(each.name == "reward_std" for each in settings.filters.dynamic_sampling):
        remedies.append('add the filter reward_std ([[filters.dynamic_sampling]] name = "reward_std")')
    remedies.append(f"raise sampling.rollout_temperature = {settings.sampling.rollout_temperature:g}")
    levels = [f"{each.id} at level {each.level}" for each in settings.prompts.environments]
    what = f"level ({', '.join(levels)})" if levels else "kind of prompts"
    remedies.append(f"choose {_direction(batch)} {what}")
    reward = batch.metrics["rollout/reward_mean"]
    _log.warning(
        "%d batches in a row changed nothing: %s (mean reward %.3f): %s",
        num_in_a_row,
        EQUAL_REWARDS,
        reward,
        ", or ".join(remedies),
    )


def _direction(batch: TrainBatch) -> str:
    judged = Counter(rollout.verdict.correct for group in batch.groups for rollout in group.rollouts if rollout.verdict)
    if judged[Correct.NO] and not judged[Correct.YES]:
        return "an easier"
    return "a harder" if judged[Correct.YES] and not judged[Correct.NO] else "another"
