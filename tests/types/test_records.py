from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfeed.errors import RewardError
from rollfeed.testing import sample_of
from rollfeed.types import (
    Correct,
    Group,
    LedgerCounts,
    Outcome,
    Picture,
    Prompt,
    Rollout,
    Sample,
    SampleStatus,
    TrainBatch,
    Verdict,
    VersionSpan,
)

PICTURE = Picture(content_hash="ab12", media_type="image/png", width=4, height=3, source="a.png")
KEYS = ("token_ids", "response_length", "loss_mask", "logprobs", "version_spans", "status")


def make_sample(**changes: Any) -> Sample:
    values: dict[str, Any] = {
        "loss_mask": np.array([1.0, 0.0, 0.5], np.float32),
        "logprobs": np.array([-0.1, 0.0, -2.5], np.float32),
        "version_spans": (VersionSpan(0, 1, 3), VersionSpan(1, 3, 4)),
        "group_index": 2,
        "index": 11,
        "rollout_id": 10,
    }
    return sample_of([1, 2], [3, 4, 5], **{**values, **changes})


def make_group(*rewards: Any) -> Group:
    prompt = Prompt(prompt_id="p", source="s", text="", token_ids=np.zeros(2, np.int32))
    rollouts = tuple(
        Rollout(rollout_id=number, samples=(make_sample(reward=reward, rollout_id=number),))
        for number, reward in enumerate(rewards)
    )
    return Group(group_index=2, prompt=prompt, rollouts=rollouts)


@pytest.mark.parametrize("status", SampleStatus)
def test_every_status_survives_the_dictionary_form(status) -> None:
    record = json.loads(json.dumps(make_sample(status=status).to_dict()))
    assert Sample.from_dict(record).status is status


def test_the_dictionary_form_keeps_everything() -> None:
    sample = make_sample(
        response="four",
        label=[4],
        reward={"score": 0.0},
        metadata={"a": {"b": None}},
        images=(PICTURE,),
        non_generation_seconds=0.25,
        cached_tokens=2,
        remove_sample=True,
        extra={"teacher_entropies": [0.5]},
    )
    record = json.loads(json.dumps(sample.to_dict()))
    again = Sample.from_dict(record)
    assert again.to_dict() == sample.to_dict()
    assert (again.token_ids.dtype, again.loss_mask.dtype, again.logprobs.dtype) == (np.int32, np.float32, np.float32)
    assert again.version_spans == sample.version_spans
    assert again.extra == {"teacher_entropies": [0.5]}


def test_unknown_keys_are_written_back_unchanged() -> None:
    record = {**make_sample().to_dict(), "weight_versions": ["a", "b"], "spec_info": {"accepted": 3}}
    assert Sample.from_dict(record).to_dict() == record


@pytest.mark.parametrize("key", [*KEYS, "group_index", "index", "rollout_id"])
def test_a_dictionary_without_a_required_key_is_refused_by_name(key) -> None:
    record = make_sample().to_dict()
    del record[key]
    with pytest.raises(ValueError, match=f"not a sample: missing .*{key}"):
        Sample.from_dict(record)


def test_an_unknown_status_is_refused() -> None:
    with pytest.raises(ValueError, match="'done' is not a valid SampleStatus"):
        Sample.from_dict({**make_sample().to_dict(), "status": "done"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_length": 6}, "response_length = 6 does not fit 5 tokens"),
        ({"response_length": -1}, "response_length = -1 does not fit 5 tokens"),
        ({"loss_mask": np.ones(2, np.float32)}, r"loss_mask has shape \(2,\), the response 3 tokens"),
        ({"logprobs": np.ones(4, np.float32)}, r"logprobs has shape \(4,\), the response 3 tokens"),
        ({"logprobs": np.ones((3, 1), np.float32)}, r"logprobs has shape \(3, 1\)"),
        ({"version_spans": ()}, "cover 0 of 3 response tokens"),
        ({"version_spans": (VersionSpan(0, 2, 0),)}, "cover 2 of 3 response tokens"),
        ({"version_spans": (VersionSpan(0, 1, 0), VersionSpan(2, 3, 0))}, "do not cover 3 response tokens in order"),
        ({"version_spans": (VersionSpan(0, 2, 0), VersionSpan(1, 3, 0))}, "do not cover 3 response tokens in order"),
        ({"version_spans": (VersionSpan(0, 0, 0), VersionSpan(0, 3, 0))}, "do not cover 3 response tokens in order"),
        ({"version_spans": (VersionSpan(0, 4, 0),)}, "cover 4 of 3 response tokens"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_sample(**changes)


@given(num_prompt=st.integers(0, 5), num_response=st.integers(0, 5))
@settings(deadline=None)
def test_prompt_and_response_split_the_tokens(num_prompt, num_response) -> None:
    sample = make_sample(
        token_ids=np.arange(num_prompt + num_response, dtype=np.int32),
        response_length=num_response,
        loss_mask=np.ones(num_response, np.float32),
        logprobs=np.zeros(num_response, np.float32),
        version_spans=(VersionSpan(0, num_response, 1),) if num_response else (),
    )
    assert sample.prompt_length == num_prompt
    assert sample.response_token_ids.tolist() == list(range(num_prompt, num_prompt + num_response))


def test_the_oldest_version_comes_from_the_spans() -> None:
    assert make_sample().oldest_version == 3
    empty = np.zeros(0, np.float32)
    assert make_sample(response_length=0, loss_mask=empty, logprobs=empty, version_spans=()).oldest_version is None


@pytest.mark.parametrize(("reward", "value"), [(0.0, 0.0), (-1, -1.0), (1, 1.0), (0.5, 0.5)])
def test_a_number_is_its_own_reward_value(reward, value) -> None:
    assert make_sample(reward=reward).get_reward_value() == value
    assert make_sample(reward=reward).get_reward_value("ignored") == value


def test_reward_key_picks_the_number_and_zero_is_a_value() -> None:
    sample = make_sample(reward={"score": 0.0, "format": 1})
    assert sample.get_reward_value("score") == 0.0
    assert sample.get_reward_value("format") == 1.0


@pytest.mark.parametrize(
    ("reward", "key", "message"),
    [
        (None, None, r"sample 11 has no reward yet \(status completed\)"),
        ({"score": 1.0}, None, r"sample 11 has a reward dictionary with \['score'\]: set reward_key"),
        ({"score": 1.0}, "scores", r"reward_key = 'scores' is not among its rewards \['score'\]"),
    ],
)
def test_a_reward_that_cannot_be_read_is_an_error_that_names_it(reward, key, message) -> None:
    with pytest.raises(RewardError, match=message):
        make_sample(reward=reward).get_reward_value(key)


def test_a_verdict_scores_every_fork_of_a_rollout() -> None:
    rollout = Rollout(rollout_id=10, samples=(make_sample(), make_sample(index=12)))
    scored = rollout.with_reward(Verdict(reward=0.0, correct=Correct.NO))
    assert [sample.reward for sample in scored.samples] == [0.0, 0.0]
    assert [sample.reward for sample in rollout.samples] == [None, None]


def rollout_of(*rewards, **changes) -> Rollout:
    return Rollout(
        rollout_id=10,
        samples=tuple(make_sample(index=11 + i, reward=reward, **changes) for i, reward in enumerate(rewards)),
    )


@pytest.mark.parametrize(
    ("rewards", "verdicts", "own", "mean"),
    [
        ([None, None], [0.5], [0.5, 0.5], 0.5),
        ([0.2, 0.9], [0.2, 0.9], [0.2, 0.9], 0.55),
        ([0.2, None], [0.2, 0.5], [0.2, 0.5], 0.35),
        ([0.0, None], [0.0, 1.0], [0.0, 1.0], 0.5),
        ([{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0}], [{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0}], None, None),
    ],
)
def test_samples_keep_rewards_of_their_own_and_the_rollout_has_their_mean(rewards, verdicts, own, mean) -> None:
    rollout = rollout_of(*rewards)
    assert len(rollout.parts()) == len(verdicts)
    scored = rollout.with_verdicts([Verdict(reward=reward) for reward in verdicts])
    assert [sample.reward for sample in scored.samples] == (own or rewards)
    assert scored.get_reward_value("a") == pytest.approx(mean or 0.5)
    assert scored.is_scored
    assert scored.verdict.reward == (pytest.approx(mean) if mean else {"a": 0.5, "b": 0.5})
    assert scored.parts() == (scored,)


@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e-300])
@pytest.mark.parametrize("count", [2, 3, 5, 6, 7, 49])
def test_the_mean_of_equal_rewards_is_exactly_that_reward(value, count) -> None:
    assert rollout_of(*[value] * count).get_reward_value() == value


def test_the_verdict_of_samples_with_rewards_of_their_own_says_what_the_last_one_says() -> None:
    judged = [Verdict(reward=1.0, correct=Correct.NO), Verdict(reward=0.0, correct=Correct.YES, extracted="4")]
    scored = rollout_of(1.0, None).with_verdicts(judged)
    assert scored.verdict == Verdict(reward=0.5, correct=Correct.YES, extracted="4")


def test_a_failed_grading_of_one_sample_leaves_the_others_rewards() -> None:
    failed = Verdict(reward=None, outcome=Outcome.TIMEOUT, detail="slow")
    rollout = rollout_of(0.2, None, None).with_verdicts([Verdict(reward=0.2), failed, Verdict(reward=0.0)])
    assert (rollout.verdict, rollout.is_scored) == (failed, False)
    assert [sample.reward for sample in rollout.samples] == [0.2, None, 0.0]
    again = rollout.with_verdicts([Verdict(reward=0.2), Verdict(reward=1.0), Verdict(reward=0.0)])
    assert (again.is_scored, len(rollout.parts())) == (True, 3)


@pytest.mark.parametrize(
    ("second", "message"), [({"a": 1.0, "c": 0.0}, "'b' is not in all of them"), (0.5, "they must be numbers, or all")]
)
def test_rewards_without_a_mean_are_an_error_that_names_what_differs(second, message) -> None:
    scored = rollout_of({"a": 1.0, "b": 0.0}, second).with_verdicts(
        [Verdict(reward={"a": 1.0, "b": 0.0}), Verdict(reward=second)]
    )
    assert scored.verdict.outcome is Outcome.ERROR
    assert message in scored.verdict.detail


def test_a_rollout_with_an_aborted_sample_is_aborted() -> None:
    samples = (make_sample(status=SampleStatus.ABORTED), make_sample(status=SampleStatus.COMPLETED))
    assert Rollout(rollout_id=10, samples=samples).status is SampleStatus.ABORTED
    assert not Rollout(rollout_id=10, samples=samples).has_finished


def test_a_group_has_one_reward_a_rollout() -> None:
    group = make_group({"score": 1.0}, 0.0, -1)
    assert group.reward_values("score").tolist() == [1.0, 0.0, -1.0]
    assert group.reward_values("score").dtype == np.float64


def test_a_rollout_without_samples_failed() -> None:
    assert Rollout(rollout_id=0, samples=(), error="engine is gone").status is SampleStatus.FAILED


def test_a_batch_needs_one_advantage_a_sample() -> None:
    with pytest.raises(ValueError, match=r"\(3,\) advantages for 2 samples"):
        TrainBatch(
            step=1, policy_version=0, groups=(make_group(1.0, 0.0),), advantages_S=np.zeros(3, np.float32), metrics={}
        )


def test_a_batch_may_have_one_advantage_a_response_token() -> None:
    group = make_group(1.0, 0.0)
    lengths = [sample.response_length for sample in group.samples]
    rows = tuple(np.zeros(length, np.float32) for length in lengths)
    batch = TrainBatch(step=1, policy_version=0, groups=(group,), advantages_S=rows, metrics={})
    assert batch.advantages_S is rows
    for wrong in (rows[:1], (*rows[:1], np.zeros(lengths[1] + 1, np.float32))):
        with pytest.raises(ValueError, match=r"advantages for .* response tokens"):
            replace(batch, advantages_S=wrong)
    with pytest.raises(ValueError, match=r"\(3,\) penalties for 2 samples"):
        replace(batch, penalties_S=np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("reward", "outcome"),
    [(None, Outcome.OK), (0.0, Outcome.TIMEOUT), (0.0, Outcome.ERROR), (float("nan"), Outcome.OK)],
)
def test_a_failed_grading_is_never_a_reward(reward, outcome) -> None:
    with pytest.raises(ValueError, match=r"cannot have reward|is not finite"):
        Verdict(reward=reward, outcome=outcome)


def test_a_ledger_balances_when_every_prompt_drawn_is_somewhere() -> None:
    counts = {"trained": 1, "dropped": 1, "failed": 1, "discarded": 1, "surplus": 1, "requeued": 1, "in_flight": 1}
    assert LedgerCounts(drawn=7, **counts).balanced
    assert not LedgerCounts(drawn=8, **counts).balanced
