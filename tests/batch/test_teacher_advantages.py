from __future__ import annotations

import numpy as np
import pytest

from rollfeed.batch import AgeLimit, cut_batch
from rollfeed.batch.teacher_advantages import teacher_metrics, with_teacher
from rollfeed.config import AdvantageSettings, StalenessPolicy
from rollfeed.config.teacher import TeacherSettings
from rollfeed.errors import RunFailedError
from rollfeed.testing import group_of, make_prompt, sample_of
from rollfeed.types import BatchCut, Group, Sample

LOSS = TeacherSettings(checkpoint="teacher", coefficient=0.5, advantage_weight=2.0)


def sample(policy: list[float], teacher: list[float] | None, mask: list[float], reward: float, index: int) -> Sample:
    return sample_of(
        [1, 2],
        list(range(5, 5 + len(policy))),
        logprobs=np.array(policy, np.float32),
        teacher_logprobs=None if teacher is None else np.array(teacher, np.float32),
        loss_mask=np.array(mask, np.float32),
        reward=reward,
        index=index,
        rollout_id=index,
    )


def group(*samples: Sample) -> Group:
    return group_of(samples, prompt=make_prompt())


def test_each_trained_token_is_worth_what_the_teacher_finds_it_likelier_beside_the_groups_advantage() -> None:
    made = group(
        sample([-1.0, -2.0, 0.0], [-0.5, -4.0, -9.0], [1.0, 0.5, 0.0], 1.0, 0), sample([-3.0], [-1.0], [1.0], 0.0, 1)
    )
    first, second = with_teacher(np.array([0.5, -0.5], np.float32), [made], settings=LOSS)
    np.testing.assert_allclose(first, [1.0 + 0.25, 1.0 - 1.0, 1.0])
    np.testing.assert_allclose(second, [-1.0 + 1.0])
    assert first.dtype == np.float32


def test_advantages_of_tokens_are_added_token_by_token() -> None:
    made = group(sample([-1.0, -2.0], [-2.0, -2.0], [1.0, 1.0], 1.0, 0))
    (row,) = with_teacher((np.array([0.25, 4.0], np.float32),), [made], settings=LOSS)
    np.testing.assert_allclose(row, [0.5 - 0.5, 8.0])


def test_rewards_of_a_teacher_leave_advantages_as_they_are() -> None:
    settings = TeacherSettings(checkpoint="teacher", use="reward")
    advantages = np.array([0.5], np.float32)
    made = group(sample([-1.0], [-2.0], [1.0], 1.0, 0))
    assert with_teacher(advantages, [made], settings=settings) is advantages


def test_a_sample_that_no_teacher_has_scored_ends_the_run_rather_than_to_count_as_zero() -> None:
    made = group(sample([-1.0], None, [1.0], 1.0, 7))
    with pytest.raises(RunFailedError, match=r"sample 7 has no teacher_logprobs.*without \[teacher\]"):
        with_teacher(np.zeros(1, np.float32), [made], settings=LOSS)
    untrained = group(sample([0.0], None, [0.0], 1.0, 7))
    (row,) = with_teacher(np.array([3.0], np.float32), [untrained], settings=LOSS)
    np.testing.assert_allclose(row, [6.0])


def test_policies_without_logprobs_end_the_run() -> None:
    made = group(sample([float("nan")], [-1.0], [1.0], 1.0, 3))
    with pytest.raises(RunFailedError, match="sample 3 has a token whose advantage is not finite"):
        with_teacher(np.zeros(1, np.float32), [made], settings=LOSS)


def test_the_batch_has_the_advantages_and_tells_the_divergence_over_trained_tokens() -> None:
    made = group(
        sample([-1.0, -2.0, -7.0], [-0.5, -4.0, -1.0], [1.0, 1.0, 0.0], 1.0, 0),
        sample([-3.0], [-1.0], [1.0], 0.0, 1),
    )
    cut = cut_batch(
        [made],
        step=0,
        policy_version=0,
        age_rule=AgeLimit(max_staleness=None, policy=StalenessPolicy.DROP),
        reward_key=None,
        estimator=AdvantageSettings(),
        teacher=TeacherSettings(checkpoint="teacher"),
    )
    assert isinstance(cut, BatchCut)
    first, second = cut.batch.advantages_S
    np.testing.assert_allclose(first, [0.5, -2.0, 0.0])
    np.testing.assert_allclose(second, [2.0])
    assert cut.batch.metrics["rollout/teacher_kl"] == pytest.approx(-(0.5 - 2.0 + 2.0) / 3)
    assert cut.batch.metrics["rollout/teacher_kl_max"] == pytest.approx(2.0)
    assert teacher_metrics([group(sample([-1.0], None, [1.0], 1.0, 0))]) == {}
