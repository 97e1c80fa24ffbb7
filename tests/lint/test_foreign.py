"""Saved rollouts of other programs: written from their documented fields, clean and with faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.lint.making import Made, lint, made

from rollfeed.errors import ConfigError, DataError
from rollfeed.lint import Finding, Flaw, read_subjects, sample_files
from rollfeed.testing import make_sample


def found_in(path: Path, *, tokenizer: Any = None) -> tuple[int, list[Finding]]:
    subjects = [subject for file in sample_files(path) for subject in read_subjects(file)]
    return len(subjects), lint(*subjects, tokenizer=tokenizer)


def write_lines(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def slime_sample(sample: Made, **changes: Any) -> dict[str, Any]:
    record = {
        "group_index": 0,
        "index": 0,
        "rollout_id": None,
        "prompt": sample.prompt.text,
        "tokens": sample.ids,
        "response": "So 17.",
        "response_length": len(sample.mask),
        "label": "17",
        "reward": 1.0,
        "loss_mask": [int(weight) for weight in sample.mask],
        "weight_versions": ["3", "3", "4"],
        "rollout_log_probs": sample.logprobs,
        "remove_sample": False,
        "status": "completed",
        "metadata": {},
        "spec_info": {},
    }
    return {**record, **changes}


def save(path: Path, *samples: Any) -> Path:
    torch = pytest.importorskip("torch")
    torch.save({"rollout_id": 7, "samples": list(samples)}, path)
    return path


def test_saved_rollouts_of_slime_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sample = made()
    as_tensors = slime_sample(sample, tokens=torch.tensor(sample.ids), rollout_log_probs=torch.tensor(sample.logprobs))
    save(tmp_path / "rollout_7.pt", slime_sample(sample), {**as_tensors, "index": 1})
    assert found_in(tmp_path, tokenizer=sample.tokenizer) == (2, [])
    assert found_in(tmp_path) == (2, [])


def test_faults_in_saved_rollouts_of_slime_are_found(tmp_path: Path) -> None:
    trained = made()
    trained.mask = [1.0] * len(trained.mask)
    back = slime_sample(made(), weight_versions=["4", "3"])
    forks = [slime_sample(made(), rollout_id=5, index=index) for index in (5, 6)]
    cut = slime_sample(made(end=False))
    save(tmp_path / "7.pt", slime_sample(trained), back, *forks, cut)
    _, findings = found_in(tmp_path, tokenizer=trained.tokenizer)
    assert {found.kind for found in findings} == {
        Flaw.TOOL_TOKEN_TRAINED,
        Flaw.VERSION_GAP,
        Flaw.FORK_TRAINED_TWICE,
        Flaw.MISSING_END_OF_TURN,
    }
    assert {found.place.source for found in findings} == {f"7.pt, sample {number}" for number in (0, 1, 3, 4)}


class Bomb:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def test_a_saved_rollout_that_could_run_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "7.pt", Bomb())
    with pytest.raises(ConfigError, match="could run code"):
        list(read_subjects(path))
    assert "executed" not in capsys.readouterr().out


def node(sample: Made, start: int, end: int, role: str, parent: int | None, *, opening: int = 0) -> dict[str, Any]:
    """Return a message with its tokens: of an assistant, what opens its turn and then what was sampled."""
    first = len(sample.prompt.token_ids)
    is_sampled = role == "assistant"
    return {
        "parent": parent,
        "message": {"role": role, "content": "..."},
        "sampled": is_sampled,
        "token_ids": sample.ids[first + start - opening : first + end],
        "mask": [False] * opening + [is_sampled] * (end - start),
        "logprobs": [round(each, 4) for each in sample.logprobs[start:end]] if is_sampled else [],
    }


def trace(sample: Made) -> dict[str, Any]:
    (_, first_end), (second, second_end), _ = sample.turns
    nodes = [
        node(sample, -len(sample.prompt.token_ids), -3, "user", None),
        node(sample, 0, first_end, "assistant", 0, opening=3),
        node(sample, first_end, second - 3, "tool", 1),
        node(sample, second, second_end, "assistant", 2, opening=3),
        node(sample, second_end, second_end + 4, "tool", 1),
    ]
    calls = [{"node": 1, "finish_reason": "tool_calls"}, {"node": 3, "finish_reason": "stop"}]
    about = {"version": 1, "id": "t", "task": {}, "agent": {}, "is_completed": True, "info": {"prime_rl": {}}}
    return {**about, "nodes": nodes[:4], "calls": calls}


def test_traces_of_prime_rl_are_read(tmp_path: Path) -> None:
    sample = made()
    write_lines(tmp_path / "rollouts" / "step_10" / "train_rollouts.jsonl", trace(sample))
    write_lines(tmp_path / "rollouts" / "step_9" / "train_rollouts.jsonl", trace(sample), trace(sample))
    assert [file.parent.name for file in sample_files(tmp_path)] == ["step_9", "step_10"]
    assert found_in(tmp_path, tokenizer=sample.tokenizer) == (3, [])


def test_faults_in_traces_of_prime_rl_are_found(tmp_path: Path) -> None:
    sample = made()
    told = trace(sample)
    told["nodes"][2]["mask"] = [True] * len(told["nodes"][2]["token_ids"])
    _, findings = found_in(write_lines(tmp_path / "told.jsonl", told))
    assert [found.kind for found in findings if found.kind is not Flaw.IMPOSSIBLE_LOGPROB] == [Flaw.TOOL_TOKEN_TRAINED]
    short = trace(sample)
    short["nodes"][3]["logprobs"].pop()
    _, findings = found_in(write_lines(tmp_path / "short.jsonl", short))
    assert [found.kind for found in findings] == [Flaw.IMPOSSIBLE_LOGPROB]


def test_branches_of_a_trace_count_their_common_turns_once(tmp_path: Path) -> None:
    forked = trace(made())
    forked["nodes"] += [{**forked["nodes"][2], "parent": 1}, {**forked["nodes"][3], "parent": 4}]
    assert found_in(write_lines(tmp_path / "forked.jsonl", forked)) == (2, [])


def flat(sample: Made, **changes: Any) -> dict[str, Any]:
    start = len(sample.prompt.token_ids)
    record = {
        "example_id": 4,
        "prompt_ids": sample.ids[:start],
        "prompt_mask": [0] * start,
        "completion_ids": sample.ids[start:],
        "completion_mask": [int(weight) for weight in sample.mask],
        "completion_logprobs": sample.logprobs,
        "reward": 1.0,
        "advantage": 0.5,
        "is_truncated": False,
        "task": "t",
    }
    return {**record, **changes}


@pytest.mark.parametrize("form", ["flat", "trajectory"])
def test_rows_of_prime_rl_of_before_are_read(tmp_path: Path, form: str) -> None:
    clean, faulty = made(), made()
    faulty.mask = [1.0] * len(faulty.mask)
    rows = [flat(clean), flat(faulty)]
    if form == "trajectory":
        rows = [{"prompt": [], "completion": [], "example_id": 4, "trajectory": [{"tokens": row}]} for row in rows]
    count, findings = found_in(write_lines(tmp_path / "rows.jsonl", *rows), tokenizer=clean.tokenizer)
    assert count == 2
    assert {(found.kind, found.place.source) for found in findings} == {(Flaw.TOOL_TOKEN_TRAINED, "rows.jsonl, line 2")}


def test_rows_of_verl_are_text_and_say_so(tmp_path: Path) -> None:
    row = {
        "input": "user\nWhat is 1 + 1, and why is it so?\nassistant\n",
        "output": "It is 2.",
        "gts": "2",
        "score": 1.0,
    }
    leaked = {**row, "output": row["input"] + row["output"]}
    write_lines(tmp_path / "1.jsonl", {**row, "step": 1}, {**leaked, "step": 1})
    subjects = [subject for file in sample_files(tmp_path) for subject in read_subjects(file)]
    assert [subject.token_ids for subject in subjects] == [None, None]
    assert [found.kind for found in lint(*subjects)] == [Flaw.PROMPT_TRAINED]


def test_samples_of_a_gateway_are_read_in_their_dictionary_form(tmp_path: Path) -> None:
    samples = [make_sample("yes", member=member).to_dict() for member in range(3)]
    write_lines(tmp_path / "samples.jsonl", *samples, {**samples[0], "loss_mask": [1.0, 1.0]})
    count, findings = found_in(tmp_path)
    assert count == 4
    assert [(found.kind, found.place.source) for found in findings] == [(Flaw.SHAPE, "samples.jsonl, line 4")]


@pytest.mark.parametrize("line", ['{"a": 1}', "[1]", "{", "[" * 100_000, '{"tokens": [1, -2], "response_length": 1}'])
def test_what_is_no_sample_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match="line 1"):
        found_in(tmp_path)


def test_a_folder_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no samples there"):
        sample_files(tmp_path)
