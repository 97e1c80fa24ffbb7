"""Trajectories of the Agent Trajectory Interchange Format: samples come back as they were, others become rows."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lint.making import Made, made

from rollfeed.atif import conversation_of, samples_of, trajectory_of
from rollfeed.cli.main import main
from rollfeed.protocols import OWN_CONTEXT
from rollfeed.testing import make_prompt, make_sample
from rollfeed.types import Sample, SampleStatus, VersionSpan


def sample_of(origin: Made) -> Sample:
    length = len(origin.mask)
    return Sample(
        token_ids=np.array(origin.ids, np.int32),
        response_length=length,
        loss_mask=np.array(origin.mask, np.float32),
        logprobs=np.array(origin.logprobs, np.float32),
        version_spans=(VersionSpan(0, 5, 2), VersionSpan(5, length, 3)),
        status=SampleStatus.TRUNCATED,
        group_index=7,
        index=31,
        rollout_id=12,
        response="So 17.",
        reward={"score": 0.5},
        metadata={"a": [1]},
        precision="fp32",
    )


def exported(sample: Sample, origin: Made) -> dict[str, Any]:
    told = trajectory_of(
        sample,
        prompt=origin.prompt,
        tokenizer=origin.tokenizer,
        model_name="m",
        version="1",
        session_id="group-7-rollout-12",
    )
    return json.loads(json.dumps(told))


def same(one: Sample, other: Sample) -> bool:
    return one.to_dict() == other.to_dict()


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_a_sample_comes_back_as_it_was(turns: int, masked: bool) -> None:
    origin = made(turns=tuple(f"turn {number}" for number in range(turns)))
    sample = sample_of(origin)
    if masked:
        weights = sample.loss_mask.copy()
        weights[:3] = [0.0, 0.25, 0.0]
        sample = replace(sample, loss_mask=weights)
    (again,) = samples_of(exported(sample, origin), index=0, rollout_id=0)
    assert same(again, sample)


def test_a_sample_that_ends_with_what_it_was_told_or_has_no_turn_comes_back() -> None:
    origin = made()
    whole = sample_of(origin)
    cut = len(origin.prompt.token_ids) + origin.turns[1][0]
    length = cut - len(origin.prompt.token_ids)
    told = replace(
        whole,
        token_ids=whole.token_ids[:cut],
        response_length=length,
        loss_mask=whole.loss_mask[:length],
        logprobs=whole.logprobs[:length],
        version_spans=(VersionSpan(0, length, 3),),
    )
    (again,) = samples_of(exported(told, origin), index=0, rollout_id=0)
    assert same(again, told)
    assert samples_of(exported(make_sample(""), origin), index=0, rollout_id=0) == []


def test_a_fork_keeps_its_context() -> None:
    fork = make_sample("yes", metadata={OWN_CONTEXT: True}, prompt=make_prompt("a summary"))
    (again,) = samples_of(exported(fork, made()), index=0, rollout_id=0)
    assert same(again, fork)


def test_steps_are_the_messages_and_the_turns_with_what_follows() -> None:
    origin = made()
    steps = exported(sample_of(origin), origin)["steps"]
    assert [(step["step_id"], step["source"]) for step in steps] == [
        (1, "user"),
        (2, "agent"),
        (3, "agent"),
        (4, "agent"),
    ]
    assert steps[1]["message"] == "I call the counter."
    assert "the result is 17" in steps[1]["observation"]["results"][0]["content"]
    assert "observation" not in steps[3]


def of_others(origin: Made, **changes: Any) -> dict[str, Any]:
    """Return a trajectory as another program writes it."""
    whole = exported(sample_of(origin), origin)
    del whole["extra"], whole["trajectory_id"]
    return {**whole, "schema_version": "ATIF-v1.4", **changes}


def test_trajectories_of_others_become_samples() -> None:
    origin = made()
    (sample,) = samples_of(of_others(origin), index=4, rollout_id=2)
    assert sample.token_ids.tolist() == origin.ids
    assert sample.loss_mask.tolist() == origin.mask
    assert (sample.index, sample.rollout_id, sample.status) == (4, 2, SampleStatus.COMPLETED)


def test_another_context_begins_another_sample_and_copied_turns_are_not_trained() -> None:
    told = of_others(made())
    told["steps"][3]["metrics"]["prompt_token_ids"] = [5, 6, 7]
    told["steps"][1]["is_copied_context"] = True
    first, second = samples_of(told, index=0, rollout_id=0)
    assert second.token_ids[:3].tolist() == [5, 6, 7]
    assert second.prompt_length == 3
    assert first.loss_mask.sum() == len(told["steps"][2]["metrics"]["completion_token_ids"])


def test_sub_agents_are_samples_of_the_same_rollout() -> None:
    told = of_others(made())
    told["subagent_trajectories"] = [deepcopy(told)]
    assert [(each.index, each.rollout_id) for each in samples_of(told, index=0, rollout_id=9)] == [(0, 9), (1, 9)]


@pytest.mark.parametrize("missing", ["prompt_token_ids", "completion_token_ids", "logprobs"])
def test_a_trajectory_without_all_tokens_makes_no_sample(missing: str) -> None:
    told = of_others(made())
    del told["steps"][2]["metrics"][missing]
    assert samples_of(told, index=0, rollout_id=0) == []


def test_a_trajectory_is_a_conversation_with_calls_and_answers() -> None:
    call = {"tool_call_id": "c1", "function_name": "look", "arguments": {"at": 1}}
    agent = {"name": "a", "version": "1", "tool_definitions": [{"type": "function", "function": {"name": "look"}}]}
    answer = {"results": [{"source_call_id": "c1", "content": [{"type": "text", "text": "a cat"}]}]}
    steps = [
        {"step_id": 1, "source": "system", "message": "Be brief."},
        {"step_id": 2, "source": "user", "message": "What is there?"},
        {"step_id": 3, "source": "agent", "message": "", "tool_calls": [call], "observation": answer},
        {"step_id": 4, "source": "agent", "message": "Old.", "is_copied_context": True},
        {"step_id": 5, "source": "agent", "message": "A cat.", "observation": {"results": [{"content": "done"}]}},
    ]
    row = conversation_of({"schema_version": "ATIF-v1.7", "agent": agent, "steps": steps})
    assert row["tools"] == agent["tool_definitions"]
    function = {"name": "look", "arguments": {"at": 1}}
    assert row["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is there?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": "a cat", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Old.", "step_loss_mask": 0},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "done"},
    ]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema_version": "v2"}, "schema_version"),
        ({"agent": None}, "no agent"),
        ({"steps": []}, "no steps"),
        ({"steps": [{"step_id": 2, "source": "user", "message": ""}]}, "step 1"),
        ({"steps": [{"step_id": 1, "source": "robot", "message": ""}]}, "step 1"),
    ],
)
def test_what_is_no_trajectory_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        samples_of(of_others(made(), **change), index=0, rollout_id=0)


def test_a_line_of_a_file_ends_at_its_line_break_only(tmp_path: Path) -> None:
    odd = of_others(made(), notes="a\u2028b\x85c")
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(odd, ensure_ascii=False) + "\n" for _ in range(2)))
    assert main(["atif", "import", str(tmp_path / "all.jsonl"), "--out", str(tmp_path / "out")]) == 0
    assert len((tmp_path / "out" / "samples.jsonl").read_text().splitlines()) == 2


def test_a_file_that_is_nested_without_end_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert main(["atif", "import", str(tmp_path / "deep.json"), "--out", str(tmp_path / "out")]) == 2
    assert "deep.json: cannot be read: maximum recursion depth" in capsys.readouterr().err
