"""Answers are scored wherever they are: in files of any form, standard input, runs and evaluations."""

from __future__ import annotations

import bz2
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.cli.test_show import make_commit

from rollfeed.cli.main import main
from rollfeed.config import RunSpec
from rollfeed.store import RunDirectory, RunReader

Score = Callable[..., list[dict[str, Any]]]
ROWS = [{"completion": "\\boxed{4}", "answer": "4"}, {"completion": "\\boxed{5}", "answer": "4"}]
COLUMNS = ("--column", "response=completion", "--column", "label=answer", "--rm-type", "math")


@pytest.fixture
def score(tmp_path: Path) -> Score:
    """Return a function that scores and gives the results."""

    def run(*arguments: Any) -> list[dict[str, Any]]:
        out = tmp_path / "out.jsonl"
        assert main(["score", *map(str, arguments), "--out", str(out), "--quiet"]) == 0
        return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]

    return run


@pytest.mark.parametrize("form", ["csv", "tsv", "json", "jsonl", "jsonl.bz2", "parquet"])
def test_files_of_every_form_are_scored_by_columns_of_other_names(score: Score, tmp_path: Path, form: str) -> None:
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif form == "jsonl.bz2":
        path.write_bytes(bz2.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    elif form.startswith("json"):
        path.write_text(json.dumps(ROWS) if form == "json" else "".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        separator = "," if form == "csv" else "\t"
        lines = [list(ROWS[0]), *(list(row.values()) for row in ROWS)]
        path.write_text("".join(separator.join(line) + "\n" for line in lines))
    assert [result["reward"] for result in score(path, *COLUMNS)] == [1.0, 0.0]


def test_functions_get_labels_by_the_column_that_the_settings_name(score: Score, tmp_path: Path) -> None:
    (tmp_path / "by_column.py").write_text(
        "def accuracy(completions, answer):\n    return [float(answer[0] in completions[0])]\n"
    )
    settings = tmp_path / "run.toml"
    settings.write_text(
        '[plugins]\nreward = "by_column.py:accuracy"\n[[prompts.datasets]]\npath = "a.csv"\nlabel_key = "answer"\n'
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"response": row["completion"], "label": row["answer"]}) + "\n" for row in ROWS))
    assert [result["reward"] for result in score(rows, "--settings", settings)] == [1.0, 0.0]


def test_standard_input_is_scored(score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"rm_type": "math", "response": "\\boxed{4}", "label": "4", "id": "a"}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(row).encode())))
    assert [(result["id"], result["reward"]) for result in score("-")] == [("a", 1.0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--column", "response=complet"), "--column response = 'complet': no such column; "),
        (("--column", "answer=label"), "--column answer=label: write it as name=column, for example response=comp"),
        (("--column", "response"), "--column response: write it as name=column"),
    ],
)
def test_a_column_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("completion,answer\n4,4\n")
    assert main(["score", str(path), *options, "--rm-type", "math", "--out", str(tmp_path / "out.jsonl")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_an_evaluation_is_scored(score: Score, settings_file: Callable[..., Path], tmp_path: Path) -> None:
    assert main(["eval", str(settings_file()), "--out", str(tmp_path / "eval"), "--quiet"]) == 0
    stored = pq.read_table(tmp_path / "eval" / "answers.parquet").to_pylist()
    results = score(tmp_path / "eval", "--rm-type", "exact")
    assert [each["id"] for each in results] == [f"{row['set']}/{row['index']}/{row['answer']}" for row in stored]
    graded = {row["set"]: [] for row in stored}
    for row, each in zip(stored, results, strict=True):
        graded[row["set"]].append(each["reward"] == row["reward"])
    assert all(graded["questions"])


def test_a_run_is_scored_by_its_own_settings_or_by_others(
    score: Score, settings_file: Callable[..., Path], tmp_path: Path
) -> None:
    told = "def length(response, answer):\n    assert answer == 4\n    return float(len(response))\n"
    (tmp_path / "score_rewards.py").write_text(told)
    overrides = ["plugins.reward=score_rewards:length", "reward.functions_in_workers=false"]
    spec = RunSpec.load(settings_file(), overrides)
    tree, identity = spec.settings.model_dump(mode="json"), spec.settings.identity()
    run = tmp_path / "run"
    with RunDirectory.open(run, settings=tree, identity=identity, overwrite=False, folders=spec.folders) as directory:
        directory.commit(make_commit(0), reward_key=None)
        directory.finish(None)
    with RunReader(run) as reader:
        groups = [*reader.batch(0).groups, *(each.group for each in reader.dropped(0))]
    expected = {
        f"0/{group.group_index}/{place}": float(len(rollout.samples[-1].response))
        for group in groups
        for place, rollout in enumerate(group.rollouts)
        if rollout.has_finished
    }
    assert {each["id"]: each["reward"] for each in score(run)} == expected
    assert main(["score", str(run), "--out", str(tmp_path / "out.jsonl"), "--workers", "0"]) == 2
    other = score(run, "--rm-type", "random")
    assert {each["id"] for each in other} == expected.keys()
    assert {each["reward"] for each in other} <= {0.0, 1.0}
