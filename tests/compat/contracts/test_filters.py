"""Filters: what they return, the built-in ones, and the groups that are kept although a filter would rather not."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.compat.slime_plugins.names.forms import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
    should_drop_dynamic_filter_output,
    sort_by_reward_std,
)
from rollfeed.compat.slime_plugins.names.slime_sample import Sample
from rollfeed.errors import PromptsEndedError
from rollfeed.testing import ListSource

ARGS = Namespace(reward_key=None)


def group(*rewards: Any) -> list[Sample]:
    return [Sample(reward=reward) for reward in rewards]


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [
        ((0.0, 1.0), True, None),
        ((1.0, 1.0), False, "zero_std_1.0"),
        ((0.1,) * 8, False, "zero_std_0.1"),  # in float32 they differ
        ((1.0,), False, "zero_std_1.0"),
    ],
)
def test_groups_with_equal_rewards_are_dropped(rewards: Any, keep: bool, reason: str | None) -> None:
    output = check_reward_nonzero_std(ARGS, group(*rewards))
    assert output == DynamicFilterOutput(keep=keep, reason=reason)


def test_a_rollout_with_several_samples_counts_once_and_by_the_key() -> None:
    keyed = Namespace(reward_key="score")
    forked = [group({"score": 0.0}, {"score": 1.0}), group({"score": 1.0})]
    assert not check_reward_nonzero_std(keyed, forked).keep
    assert check_reward_nonzero_std(keyed, [*forked, group({"score": 0.0})]).keep


@pytest.mark.parametrize(("remaining", "dropped"), [(3, True), (2, False)])
def test_a_usable_group_stays_where_the_step_would_be_short(remaining: int, dropped: bool) -> None:
    sizes = {"remaining_batch_size": remaining, "target_data_size": 2}
    usable = check_reward_nonzero_std_with_fallback(ARGS, group(1.0, 1.0))
    assert should_drop_dynamic_filter_output(usable, **sizes) is dropped
    assert should_drop_dynamic_filter_output(check_reward_nonzero_std(ARGS, group(1.0, 1.0)), **sizes)
    assert not should_drop_dynamic_filter_output(check_reward_nonzero_std(ARGS, group(0.0, 1.0)), **sizes)


async def test_the_run_uses_such_a_group_where_prompts_run_out(
    write_plugins: Callable[[str], Path], make_batches: Callable[..., Any]
) -> None:
    """Not as in slime, which rather uses it than that it submits more prompts than a batch has."""
    path = "slime:slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    settings = {
        "folder": write_plugins(""),
        "reward_fn": lambda sample, prompt: float(sample.index % 2 and sample.group_index != 1),
    }
    few = ["a", "b", "c"]
    with pytest.raises(PromptsEndedError, match="2 of 3 groups"):
        await make_batches(1, source=ListSource(few), group_filters=[path], **settings)
    usable = [f"{path}_with_fallback"]
    (batch,) = await make_batches(1, source=ListSource(few), group_filters=usable, **settings)
    assert [group.group_index for group in batch.groups] == [0, 1, 2]
    (batch,) = await make_batches(1, source=ListSource([*few, "d"]), group_filters=usable, **settings)
    assert [group.group_index for group in batch.groups] == [0, 2, 3]


@pytest.mark.parametrize(("given", "keep"), [(True, True), (False, False)])
def test_a_bool_is_put_into_the_newer_form(make_run: Any, given: bool, keep: bool) -> None:
    assert call_dynamic_filter(lambda args, samples: given, ARGS, []).keep is keep
    assert call_dynamic_filter(None, ARGS, []).keep is True


def test_drops_are_counted_by_reason_where_there_is_one() -> None:
    gatherer = MetricGatherer()
    for reason in ("a", "a", None, "b"):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_a": 2, "rollout/dynamic_filter/drop_b": 1}


def test_the_over_sampling_filter_puts_the_widest_spread_first() -> None:
    groups = [group(1.0, 1.0), group(0.0, 1.0), group(0.5, 1.0)]
    assert sort_by_reward_std(ARGS, groups) == [groups[1], groups[2], groups[0]]
