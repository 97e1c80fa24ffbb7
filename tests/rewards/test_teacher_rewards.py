from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollfeed.app.teaching.teacher_rewards import BY_TEACHER, TaughtScorer
from rollfeed.config.teacher import TeacherSettings
from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.registry import BUILTIN_GRADERS
from rollfeed.types import Correct, Outcome, Rollout, SampleStatus, VersionSpan


def scorer(rm_type: str | None = None, **settings: Any) -> TaughtScorer:
    hub = RewardHub(graders=BUILTIN_GRADERS, rm_type=rm_type, timeout_seconds=60.0)
    return TaughtScorer(hub, TeacherSettings(checkpoint="teacher", **settings))


def taught(rollout: Rollout, *above: float) -> Rollout:
    """Return the rollout with a token a number, which the teacher finds so many nats likelier."""
    length = len(above)
    policy = np.full(length, -2.0, np.float32)
    samples = tuple(
        replace(
            sample,
            token_ids=np.zeros(2 + length, np.int32),
            response_length=length,
            loss_mask=np.ones(length, np.float32),
            logprobs=policy,
            teacher_logprobs=policy + np.array(above, np.float32),
            version_spans=(VersionSpan(0, length, 0),),
        )
        for sample in rollout.samples
    )
    return replace(rollout, samples=samples)


@pytest.mark.parametrize(("reduction", "value"), [("mean", 0.5 * -1.0), ("sum", 0.5 * -2.0)])
async def test_the_reward_is_minus_the_divergence_over_all_trained_tokens(
    reduction: str, value: float, make_prompt: Any, make_rollout: Any
) -> None:
    rollout = taught(make_rollout(0, "7"), 1.0, -3.0)
    (verdict,) = await scorer(use="reward", coefficient=0.5, reduction=reduction).score([rollout], make_prompt())
    assert verdict.reward == pytest.approx(value)
    assert (verdict.correct, verdict.detail) == (Correct.UNDEFINED, BY_TEACHER)


async def test_forks_count_with_all_their_tokens(make_prompt: Any, make_rollout: Any) -> None:
    first, second = taught(make_rollout(0, "7"), 1.0, 1.0, 1.0), taught(make_rollout(0, "7"), -1.0)
    rollout = replace(first, samples=first.samples + second.samples)
    (verdict,) = await scorer(use="reward").score([rollout], make_prompt())
    assert verdict.reward == pytest.approx(0.5)


async def test_whether_an_answer_is_right_stays_what_its_grader_says(make_prompt: Any, make_rollout: Any) -> None:
    rollouts = [taught(make_rollout(0, "7"), -1.0), taught(make_rollout(1, "8"), -2.0)]
    verdicts = await scorer("exact", use="reward").score(rollouts, make_prompt(label="7"))
    assert [verdict.correct for verdict in verdicts] == [Correct.YES, Correct.NO]
    assert [verdict.reward for verdict in verdicts] == pytest.approx([-1.0, -2.0])


async def test_with_a_loss_rewards_are_the_graders_where_there_is_one(make_prompt: Any, make_rollout: Any) -> None:
    rollout, prompt = taught(make_rollout(0, "7"), -1.5), make_prompt(label="7")
    assert (await scorer("exact").score([rollout], prompt))[0].reward == 1.0
    assert (await scorer().score([rollout], make_prompt(label="7", rm_type="exact")))[0].reward == 1.0
    assert (await scorer().score([rollout], prompt))[0].reward == pytest.approx(-1.5)


async def test_a_reward_that_came_with_the_answer_is_kept(make_prompt: Any, make_rollout: Any) -> None:
    rollout = taught(make_rollout(0, "7", reward=0.75), -1.5)
    (verdict,) = await scorer().score([rollout], make_prompt())
    assert verdict.reward == 0.75


async def test_what_cannot_be_graded_or_was_not_taught_has_failed(make_prompt: Any, make_rollout: Any) -> None:
    unlabelled = (await scorer("number", use="reward").score([taught(make_rollout(0, "7"), -1.0)], make_prompt()))[0]
    untaught = (await scorer(use="reward").score([make_rollout(0, "7")], make_prompt()))[0]
    aborted = taught(make_rollout(0, "7", status=SampleStatus.ABORTED), -1.0)
    unfinished = (await scorer(use="reward").score([aborted], make_prompt()))[0]
    without = replace(taught(make_rollout(0, "7"), -1.0).samples[0], logprobs=np.full(1, np.nan, np.float32))
    unknown = (await scorer(use="reward").score([Rollout(rollout_id=0, samples=(without,))], make_prompt()))[0]
    verdicts = {"label": unlabelled, "no teacher_logprobs": untaught, "aborted": unfinished, "no logprobs": unknown}
    for detail, verdict in verdicts.items():
        assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)
        assert detail in verdict.detail
