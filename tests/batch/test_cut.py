from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollfeed.batch import AgeLimit, OverlongPenalty, batch_metrics, cut_batch
from rollfeed.config import AdvantageSettings, StalenessPolicy
from rollfeed.testing import make_group, make_sample
from rollfeed.types import Correct, Rollout, SampleStatus, Verdict, VersionSpan


def cut(groups, **changes):
    rule = AgeLimit(max_staleness=None, policy=StalenessPolicy.REQUEUE)
    arguments = {"reward_key": None, "estimator": AdvantageSettings(), **changes}
    return cut_batch(groups, step=3, policy_version=2, age_rule=rule, **arguments).batch


def test_a_batch_is_ordered_by_index_with_one_advantage_a_sample() -> None:
    batch = cut([make_group([0.0, 1.0], group_index=5), make_group([4.0, 0.0], group_index=2)])
    assert [group.group_index for group in batch.groups] == [2, 5]
    assert batch.advantages_S.tolist() == [2.0, -2.0, -0.5, 0.5]
    assert (batch.step, batch.policy_version) == (3, 2)


def rollout_of(response: str, *, reward: float, status: SampleStatus, correct: Correct, **changes: Any) -> Rollout:
    sample = replace(make_sample(response, reward=reward), status=status, **changes)
    return Rollout(rollout_id=0, samples=(sample,), verdict=Verdict(reward=reward, correct=correct))


def test_every_number_of_a_batch() -> None:
    rollouts = (
        rollout_of("12", reward=0.0, status=SampleStatus.TRUNCATED, correct=Correct.NO),
        rollout_of("1234", reward=1.0, status=SampleStatus.COMPLETED, correct=Correct.YES),
        rollout_of("", reward=1.0, status=SampleStatus.ABORTED, correct=Correct.YES),
        rollout_of(
            "1234",
            reward=4.0,
            status=SampleStatus.COMPLETED,
            correct=Correct.UNDEFINED,
            version_spans=(VersionSpan(0, 1, 1), VersionSpan(1, 4, 3)),
            loss_mask=np.array([0.0, 1.0, 1.0, 0.5], np.float32),
            metadata={"start_rollout_id": 2, "rewritten_turns": 3},
        ),
    )
    group = replace(make_group([0.0, 1.0, 1.0, 4.0]), rollouts=rollouts)
    untrained = make_group([1.0, 1.0, 1.0, 1.0]).without_versions_before(1)
    assert batch_metrics([group, untrained], reward_key=None, policy_version=4)["rollout/groups_untrained"] == 1
    metrics = batch_metrics([group, make_group([1.0, 1.0, 1.0, 1.0])], reward_key=None, policy_version=4)
    assert metrics == {
        "reward/equal_share": pytest.approx(7 / 12),
        "reward/label_agreement": 1.0,
        "reward/length_correlation": pytest.approx(5 / np.sqrt(9 * 11)),
        "rollout/reward_mean": 1.25,
        "rollout/reward_std": pytest.approx(np.std([0, 1, 1, 4, 1, 1, 1, 1])),
        "rollout/reward_p10": pytest.approx(0.7),
        "rollout/reward_p50": 1.0,
        "rollout/reward_p90": pytest.approx(1.9),
        "rollout/response_length_p50": 1.0,
        "rollout/response_length_p90": 4.0,
        "rollout/response_length_p99": 4.0,
        "rollout/group_reward_std": pytest.approx(np.std([0, 1, 1, 4]) / 2),
        "rollout/response_length_mean": 14 / 8,
        "rollout/response_length_min": 0.0,
        "rollout/response_length_max": 4.0,
        "rollout/truncated_ratio": 1 / 8,
        "rollout/empty_ratio": 1 / 8,
        "rollout/groups_untrained": 0.0,
        "rollout/trained_tokens": 12.5,
        "rollout/staleness_max": 4.0,
        "rollout/staleness_mean": (6 * 4 + 1) / 7,  # an empty response has no age
        "rollout/several_versions_ratio": 1 / 8,
        "rollout/resumed_ratio": 1 / 8,
        "rollout/rewritten_turns": 3.0,
        "rollout/correct_ratio": 2 / 3,
        "sources/made/groups": 2.0,
        "sources/made/reward_mean": 1.25,
        "sources/made/correct_ratio": 2 / 3,
    }


def test_each_source_of_prompts_has_numbers_of_its_own() -> None:
    easy, other = make_group([1.0, 0.0]), make_group([4.0, 4.0], group_index=1)
    judged = Verdict(reward=1.0, correct=Correct.YES), Verdict(reward=0.0, correct=Correct.NO)
    rollouts = tuple(replace(each, verdict=told) for each, told in zip(easy.rollouts, judged, strict=True))
    easy = replace(easy, prompt=replace(easy.prompt, source="sums"), rollouts=rollouts)
    other = replace(other, prompt=replace(other.prompt, source="core/words@3"))
    metrics = batch_metrics([other, easy, replace(other, group_index=2)], reward_key=None, policy_version=0)
    assert {name: value for name, value in metrics.items() if name.startswith("sources/")} == {
        "sources/core/words@3/groups": 2.0,
        "sources/core/words@3/reward_mean": 4.0,
        "sources/sums/groups": 1.0,
        "sources/sums/reward_mean": 0.5,
        "sources/sums/correct_ratio": 0.5,
    }


def test_episodes_have_numbers_of_their_own() -> None:
    plain = make_group([0.0, 1.0, 1.0])
    about = [{"num_turns": 2, "num_tool_calls": 3, "num_failed_tool_calls": 1}, {"num_turns": 5}, {}]
    rollouts = tuple(
        replace(rollout, samples=tuple(replace(sample, metadata=each) for sample in rollout.samples))
        for rollout, each in zip(plain.rollouts, about, strict=True)
    )
    metrics = batch_metrics([replace(plain, rollouts=rollouts)], reward_key=None, policy_version=0)
    assert metrics["rollout/turns_mean"] == 3.5
    assert metrics["rollout/tool_calls_mean"] == 3.0
    assert metrics["rollout/tool_calls_failed_mean"] == 1.0
    assert "rollout/turns_mean" not in batch_metrics([plain], reward_key=None, policy_version=0)


def test_a_batch_that_nobody_calls_right_or_wrong_has_no_share_of_right_answers() -> None:
    assert "rollout/correct_ratio" not in batch_metrics([make_group([0.0, 1.0])], reward_key=None, policy_version=0)


def forked(*rewards_of_rollouts, group_index: int = 0):
    """A group with a sample for each reward of each rollout."""
    plain = make_group([0.0] * len(rewards_of_rollouts), group_index=group_index)
    rollouts = [
        replace(rollout, samples=tuple(replace(rollout.samples[0], reward=reward) for reward in rewards))
        for rollout, rewards in zip(plain.rollouts, rewards_of_rollouts, strict=True)
    ]
    return replace(plain, rollouts=tuple(rollouts))


def test_a_samples_advantage_is_of_its_own_reward_and_the_baseline_is_over_rollouts() -> None:
    batch = cut([forked([0.2, 0.9, 0.4], [0.0], [1.0, 1.0])])
    np.testing.assert_allclose(batch.advantages_S, [-0.3, 0.4, -0.1, -0.5, 0.5, 0.5], rtol=1e-6)


def test_samples_that_differ_in_rollouts_that_do_not_are_compared_without_a_deviation() -> None:
    for divide in (False, True):
        batch = cut([forked([0.2, 0.8], [0.5])], estimator=AdvantageSettings(divide_by_std=divide))
        np.testing.assert_allclose(batch.advantages_S, [-0.3, 0.3, 0.0], atol=1e-6)


def test_an_advantage_function_sees_rollouts_and_its_scale_counts_for_samples() -> None:
    seen = []

    def doubled(rewards_G, *, group):
        seen.append(rewards_G.tolist())
        return 2.0 * rewards_G

    batch = cut([forked([0.25, 0.75], [0.0], [1.0])], advantage_fn=doubled)
    assert seen == [[0.5, 0.0, 1.0]]
    np.testing.assert_allclose(batch.advantages_S, [0.5, 1.5, 0.0, 2.0], rtol=1e-6)


def test_forks_that_share_a_reward_share_an_advantage_whatever_its_size() -> None:
    batch = cut([forked([1e100, 1e100], [-1e100])], advantage_fn=lambda rewards_G, *, group: np.sign(rewards_G))
    assert batch.advantages_S.tolist() == [1.0, 1.0, -1.0]


def test_metrics_read_the_rewards_of_rollouts() -> None:
    metrics = batch_metrics([forked([0.0, 0.0, 1.5], [1.0])], reward_key=None, policy_version=0)
    assert metrics["rollout/reward_mean"] == 0.75
    assert metrics["rollout/group_reward_std"] == metrics["rollout/reward_std"] == 0.25


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (5, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0), (11, -1.0), (99, -1.0)]
)
def test_the_penalty_of_long_responses_is_that_of_dapo(length: int, expected: float) -> None:
    """Equation 13: 0 up to L_max - L_cache, then ((L_max - L_cache) - length) / L_cache, -1 from L_max on."""
    sample = make_sample("x" * length)
    assert OverlongPenalty(length=10, cache=4)(sample) == expected
    assert OverlongPenalty(length=10, cache=4, factor=0.5)(sample) == expected / 2


def lengths_of(group, *lengths: int, reward=None):
    rollouts = [
        replace(
            each,
            samples=(replace(make_sample("x" * length), reward=each.samples[0].reward if reward is None else reward),),
        )
        for each, length in zip(group.rollouts, lengths, strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts))


def test_a_penalty_counts_in_advantages_and_is_kept_beside_the_reward() -> None:
    group = lengths_of(make_group([1.0, 1.0, 0.0]), 4, 8, 12)
    batch = cut([group], overlong=OverlongPenalty(length=10, cache=4))
    assert batch.penalties_S.tolist() == [0.0, -0.5, -1.0]
    assert [sample.reward for sample in batch.samples] == [1.0, 1.0, 0.0]
    final = np.array([1.0, 0.5, -1.0])
    np.testing.assert_allclose(batch.advantages_S, final - final.mean(), rtol=1e-6)
    assert batch.metrics["rollout/reward_mean"] == pytest.approx(2 / 3)
    assert batch.metrics["rollout/overlong_penalty_mean"] == -0.5
    assert batch.metrics["rollout/overlong_ratio"] == pytest.approx(2 / 3)
    assert "rollout/overlong_ratio" not in cut([group]).metrics
    assert cut([group]).penalties_S is None


def test_a_penalty_counts_in_the_reward_that_the_key_names() -> None:
    seen = []

    def advantage(rewards_G, *, group):
        seen.append(([sample.reward for sample in group.samples], rewards_G.tolist()))
        return rewards_G

    group = lengths_of(make_group([1.0]), 12, reward={"score": 1.0, "acc": 0.0})
    batch = cut([group], overlong=OverlongPenalty(length=10, cache=4), reward_key="score", advantage_fn=advantage)
    assert seen == [([{"score": 0.0, "acc": 0.0}], [0.0])]
    assert batch.samples[0].reward == {"score": 1.0, "acc": 0.0}


def test_truncated_answers_are_left_out_of_the_loss_and_counted() -> None:
    rollouts = (
        rollout_of("12", reward=0.0, status=SampleStatus.TRUNCATED, correct=Correct.NO),
        rollout_of("1234", reward=1.0, status=SampleStatus.COMPLETED, correct=Correct.YES),
    )
    group = replace(make_group([0.0, 1.0]), rollouts=rollouts)
    batch = cut([group], mask_truncated=True)
    assert [sample.remove_sample for sample in batch.samples] == [True, False]
    assert batch.metrics["rollout/truncated_masked"] == 1.0
    assert batch.metrics["rollout/trained_tokens"] == 4.0
    assert batch.advantages_S.tolist() == [-0.5, 0.5]  # its reward still is part of the baseline
    assert not any(sample.remove_sample for sample in cut([group]).samples)
    assert "rollout/truncated_masked" not in cut([group]).metrics


def test_all_samples_of_an_answer_that_was_truncated_at_its_end_are_left_out() -> None:
    group = forked([0.0, 0.0], [1.0, 1.0])
    first, second = group.rollouts
    cut_short = replace(first.samples[1], status=SampleStatus.TRUNCATED)
    group = replace(group, rollouts=(replace(first, samples=(first.samples[0], cut_short)), second))
    batch = cut([group], mask_truncated=True)
    assert [sample.remove_sample for sample in batch.samples] == [True, True, False, False]
    assert batch.metrics["rollout/truncated_masked"] == 2.0


def test_turns_and_calls_of_episodes_are_told_where_there_are_any() -> None:
    group = make_group([0.0, 1.0])
    assert "rollout/turns_mean" not in batch_metrics([group], reward_key=None, policy_version=0)
    rollouts = [
        replace(rollout, samples=tuple(replace(sample, metadata=about) for sample in rollout.samples))
        for rollout, about in zip(
            group.rollouts, ({"num_turns": 3, "num_tool_calls": 2}, {"num_turns": 2}), strict=True
        )
    ]
    metrics = batch_metrics([replace(group, rollouts=tuple(rollouts))], reward_key=None, policy_version=0)
    assert (metrics["rollout/turns_mean"], metrics["rollout/tool_calls_mean"]) == (2.5, 2.0)
    assert "rollout/tool_calls_failed_mean" not in metrics
