"""``rollfeed lint`` on whole runs: clean as they are made, and with faults planted in the files of a step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.linting import vouch_for_no_files

GAME = """
seed = 3
[model]
checkpoint = "tiny"
[model.tiny]
characters = "0123456789-?<>"
hidden_size = 32
num_layers = 2
num_heads = 2
[[prompts.environments]]
id = "core/guess_number"
level = 1
apply_chat_template = false
parameters = { style = "compact" }
[rollout]
num_rollout = 2
rollout_batch_size = 4
n_samples_per_prompt = 4
deterministic = true
[sampling]
rollout_max_response_len = 24
rollout_temperature = 0.8
[engine]
context_length = 48
num_slots = 32
threads = 1
"""
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of episodes of several turns, made once."""
    from rollfeed.cli.main import main

    folder = tmp_path_factory.mktemp("lint")
    (folder / "game.toml").write_text(GAME)
    assert main(["run", str(folder / "game.toml"), "--out", str(folder / "run"), "--quiet"]) == 0
    return folder / "run"


def test_a_run_is_clean_with_its_model_too(rollfeed, game: Path) -> None:
    result = rollfeed("lint", game, "--json", "--quiet")
    assert result.code == 0, result.out
    assert result.json["samples"] == 32
    assert result.json["findings"] == []
    assert result.json["unchecked"] == {}


def turns_of(row: dict[str, Any]) -> list[tuple[int, int]]:
    """Return where the turns of a row are in its response."""
    mask = [0.0, *row["loss_mask"], 0.0]
    edges = [at for at in range(len(mask) - 1) if (mask[at] > 0) != (mask[at + 1] > 0)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def episode(rows: Rows) -> dict[str, Any]:
    """Return the first sample of several turns."""
    return next(row for row in rows if len(turns_of(row)) > 2)


def insert(row: dict[str, Any], name: str, position: int, values: list[Any]) -> None:
    row[name] = [*row[name][:position], *values, *row[name][position:]]


def tool_token_trained(rows: Rows) -> None:
    row = episode(rows)
    row["loss_mask"][turns_of(row)[0][1]] = 1.0


def shifted_mask(rows: Rows) -> None:
    row = episode(rows)
    row["loss_mask"] = [0.0, *row["loss_mask"][:-1]]


def shifted_mask_of_one_turn(rows: Rows) -> None:
    row = next(row for row in rows if len(turns_of(row)) == 1)
    row["loss_mask"] = [0.0, *row["loss_mask"][:-1]]


def missing_end_of_turn(rows: Rows) -> None:
    row = episode(rows)
    end = turns_of(row)[0][1] - 1
    del row["token_ids"][len(row["prompt_token_ids"]) + end], row["loss_mask"][end], row["logprobs"][end]
    row["response_length"] -= 1
    row["spans"] = [{"start": 0, "end": row["response_length"], "policy_version": 0}]


def doubled_bos(rows: Rows) -> None:
    row = episode(rows)
    end = row["token_ids"][len(row["prompt_token_ids"]) + turns_of(row)[0][1] - 1]
    for name in ("token_ids", "prompt_token_ids"):
        insert(row, name, 0, [end, end])


def retokenised_turn(rows: Rows) -> None:
    row = episode(rows)
    first = len(row["prompt_token_ids"]) + turns_of(row)[0][0]
    row["token_ids"][first], row["token_ids"][first + 1] = row["token_ids"][first + 1], row["token_ids"][first] + 1


def logprob_of_another_token(rows: Rows) -> None:
    row = next(row for row in rows if len(turns_of(row)) == 1 and row["response_length"] > 3)
    row["logprobs"] = [*row["logprobs"][1:], row["logprobs"][0]]


def one_other_logprob(rows: Rows) -> None:
    episode(rows)["logprobs"][0] -= 0.2


def prompt_trained(rows: Rows) -> None:
    row = episode(rows)
    row["response_length"] += 2
    insert(row, "loss_mask", 0, [1.0, 1.0])
    insert(row, "logprobs", 0, [-0.5, -0.5])
    row["spans"] = [{"start": 0, "end": row["response_length"], "policy_version": 0}]


def truncated_marked_complete(rows: Rows) -> None:
    row = next(row for row in rows if row["status"] == "truncated" and row["loss_mask"][-1])
    row["status"] = "completed"


def fork_trained_twice(rows: Rows) -> None:
    row = episode(rows)
    rows.insert(rows.index(row), {**row, "index": 10_000})


def version_gap(rows: Rows) -> None:
    row = episode(rows)
    row["spans"] = [{**row["spans"][0], "end": 2}, {"start": 3, "end": row["response_length"], "policy_version": 0}]


FAULTS: dict[Callable[[Rows], None], set[str]] = {
    tool_token_trained: {"tool_token_trained"},
    shifted_mask: {"shifted_mask"},
    shifted_mask_of_one_turn: {"shifted_mask"},
    missing_end_of_turn: {"missing_end_of_turn"},
    doubled_bos: {"doubled_bos"},
    retokenised_turn: {"retokenised_turn", "logprob_of_another_token"},
    logprob_of_another_token: {"logprob_of_another_token"},
    one_other_logprob: {"logprob_of_another_token"},
    prompt_trained: {"prompt_trained"},
    truncated_marked_complete: {"truncated_marked_complete", "missing_end_of_turn"},
    fork_trained_twice: {"fork_trained_twice"},
    version_gap: {"version_gap"},
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_in_one_sample_is_found(rollfeed, game: Path, tmp_path: Path, plant: Callable[[Rows], None]) -> None:
    shutil.copytree(game, tmp_path / "run")
    vouch_for_no_files(tmp_path / "run")
    path = tmp_path / "run" / "batches" / "step-000001.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    plant(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    result = rollfeed("lint", tmp_path / "run", "--json", "--quiet")
    assert result.code == 1, result.err
    kinds = {found["kind"] for found in result.json["findings"]}
    assert kinds & FAULTS[plant], kinds
    assert {found["source"] for found in result.json["findings"]} == {"step 1"}


def test_what_is_found_is_shown_to_people(rollfeed, game: Path, tmp_path: Path) -> None:
    shutil.copytree(game, tmp_path / "run")
    vouch_for_no_files(tmp_path / "run")
    path = tmp_path / "run" / "batches" / "step-000000.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    shifted_mask(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    result = rollfeed("lint", tmp_path / "run")
    assert result.code == 1
    assert "shifted_mask: step 0, group" in result.out
    assert ">>>" in result.out
    assert result.out.splitlines()[-1].startswith("32 samples, ")


@pytest.mark.parametrize("arguments", [["nowhere"], ["."], [".", "--tokenizer", "nowhere"]])
def test_wrong_usage_is_told_from_findings(rollfeed, tmp_path: Path, monkeypatch, arguments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    result = rollfeed("lint", *arguments)
    assert result.code == 2
    assert result.err.startswith("rollfeed: ")


def test_samples_that_went_through_atif_are_the_same(rollfeed, game: Path, tmp_path: Path) -> None:
    assert rollfeed("atif", "export", game, "--out", tmp_path / "out").code == 0
    assert len(list((tmp_path / "out").glob("*.json"))) == 32
    assert rollfeed("atif", "import", tmp_path / "out", "--out", tmp_path / "in").code == 0
    samples = [json.loads(line) for line in (tmp_path / "in" / "samples.jsonl").read_text().splitlines()]
    by_index = {sample["index"]: sample for sample in samples}
    for path in (game / "batches").glob("*.parquet"):
        for row in pq.read_table(path).to_pylist():
            sample = by_index[row["index"]]
            for name in ("token_ids", "loss_mask", "logprobs", "status", "reward", "response", "rollout_id"):
                assert sample[name] == row[name]
    linted = rollfeed("lint", tmp_path / "in", "--json")
    assert (linted.code, linted.json["samples"]) == (0, 32)
