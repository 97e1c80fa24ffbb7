from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rollfeed.batch.guard_rails import guard_rails
from rollfeed.testing import make_group
from rollfeed.types import Correct, Group, Verdict


def group_of(rewards: list[float], lengths: list[int], right: list[bool | None]) -> Group:
    group = make_group(rewards)
    rollouts = []
    for rollout, length, is_right in zip(group.rollouts, lengths, right, strict=True):
        (sample,) = rollout.samples
        ones = np.ones(length, np.float32)
        ids = np.concatenate([sample.token_ids[: sample.prompt_length], np.zeros(length, np.int32)])
        span = sample.version_spans[0]._replace(end=length)
        sample = replace(
            sample, token_ids=ids, response_length=length, loss_mask=ones, logprobs=-ones, version_spans=(span,)
        )
        correct = Correct.UNDEFINED if is_right is None else Correct.YES if is_right else Correct.NO
        rollouts.append(replace(rollout, samples=(sample,), verdict=Verdict(reward=sample.reward, correct=correct)))
    return replace(group, rollouts=tuple(rollouts))


def test_lengths_are_compared_within_groups_only() -> None:
    # Between the groups the longer answers have the higher rewards, within them the lower ones.
    groups = [group_of([0.2, 0.1], [1, 2], [None] * 2), group_of([0.9, 0.8], [11, 12], [None] * 2)]
    assert guard_rails(groups, reward_key=None)["reward/length_correlation"] == pytest.approx(-1.0)


def test_equal_pairs_and_pairs_in_the_right_order_are_shares() -> None:
    found = guard_rails([group_of([1.0, 0.5, 0.5], [1, 2, 3], [True, False, True])], reward_key=None)
    assert found["reward/equal_share"] == pytest.approx(1 / 3)
    assert found["reward/label_agreement"] == pytest.approx(0.75)


def test_what_has_no_spread_or_no_label_has_no_number() -> None:
    found = guard_rails([group_of([1.0, 1.0], [2, 2], [True, None])], reward_key=None)
    assert found == {"reward/equal_share": 1.0}


def test_parts_of_a_mixture_have_means() -> None:
    group = make_group([{"a": 1.0, "mixture": 2.0}, {"a": 0.0, "mixture": 1.0}])
    found = guard_rails([group], reward_key="mixture")
    assert (found["reward/parts/a_mean"], found["reward/parts/mixture_mean"]) == (0.5, 1.5)
