"""What `rollfeed show` says of single samples, of several runs, and of evaluations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from rollfeed.cli.main import main
from rollfeed.cli.shown import fitted
from rollfeed.store import RunDirectory
from rollfeed.testing import sample_of
from rollfeed.types import (
    Correct,
    Dropped,
    Group,
    Prompt,
    Rollout,
    RunState,
    SampleStatus,
    StepCommit,
    TrainBatch,
    Verdict,
    VersionSpan,
)

LONG = "wide 漢字 " * 60


def group(group_index: int, rewards: list[float], *, source: str = "sums") -> Group:
    prompt = Prompt(
        prompt_id=f"{source}/{group_index}",
        source=source,
        text=f"<user>{LONG}What is {group_index}?",
        token_ids=np.arange(4, dtype=np.int32),
        messages=({"role": "user", "content": f"What is {group_index}? {LONG}"},),
        label="four",
    )
    rollouts = []
    for number, reward in enumerate(rewards):
        index = 4 * group_index + number
        sample = sample_of(
            range(4),
            range(4, 10),
            loss_mask=np.array([1, 1, 0, 0, 1, 1], np.float32),
            logprobs=np.array([-1, -3, 0, 0, -0.5, -0.5], np.float32),
            version_spans=(VersionSpan(0, 5, 1), VersionSpan(5, 6, 2)),
            status=SampleStatus.COMPLETED,
            group_index=group_index,
            index=index,
            rollout_id=index,
            response=f"{LONG}so it is {number}",
            label="four",
            metadata={"num_turns": 2},
        )
        verdict = Verdict(reward=reward, correct=Correct.YES if reward else Correct.NO, detail="compared")
        rollouts.append(Rollout(rollout_id=index, samples=(sample,)).with_reward(verdict))
    return Group(group_index=group_index, prompt=prompt, rollouts=tuple(rollouts))


def make_run(path: Path, *, num_steps: int = 2, rate: float = 1e-6, trained: bool = False) -> Path:
    settings = {"seed": 3, "train": {"optimizer": {"learning_rate": rate}}, "rollout": {"n_samples_per_prompt": 2}}
    with RunDirectory.open(path, settings=settings, identity={"seed": 3}, overwrite=False) as run:
        for step in range(num_steps):
            batch = TrainBatch(
                step=step,
                policy_version=step,
                groups=(group(2 * step, [1.0, 0.25 * step]),),
                advantages_S=np.array([0.5, -0.5], np.float32),
                metrics={
                    "rollout/reward_mean": 0.5 + step / 10,
                    "rollout/truncated_ratio": 1.0,
                    "rollout/response_length_max": 64.0,
                },
            )
            dropped = (Dropped(group=group(2 * step + 1, [0.0, 0.0], source="words"), reason="zero_std_0.0"),)
            state = RunState(next_step=step + 1, next_group_index=2 * step + 2, source={})
            run.commit(
                StepCommit(batch=batch, dropped=dropped, wasted_tokens={"dropped": 12}, state=state), reward_key=None
            )
        run.finish()
    if trained:
        lines = [{"step": step, "train/loss": 0.25, "train/grad_norm": 1.5} for step in range(num_steps)]
        (path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with three runs, the last one damaged."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first")
    make_run(folder / "rates" / "second", num_steps=4, rate=2e-6, trained=True)
    make_run(folder / "third")
    (folder / "third" / "steps.jsonl").write_bytes(b"nothing")
    return folder


@pytest.fixture
def shown(capsys) -> Callable[..., str]:
    def show(*arguments: object) -> str:
        code = main(["show", *map(str, arguments)])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return captured.out

    return show


@pytest.fixture
def refused(capsys) -> Callable[..., str]:
    def show(*arguments: object) -> str:
        assert main(["show", *map(str, arguments)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        return line

    return show


def heads(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if " of step " in line]


def test_the_worst_samples_are_listed_with_question_answer_and_label(shown, runs) -> None:
    text = shown(runs / "first", "--worst", "3")
    assert heads(text) == ["3.0", "3.1", "0.1"]
    assert "3.0 of step 1, words, completed, 6 tokens, reward 0, wrong, dropped:" in text
    assert "asked     What is 3? wide 漢字" in text
    assert "so it is 0\nexpected  four\ndetail    compared\n" in text
    assert text.endswith("one whole: --sample 3.0; more: --limit N\n")
    assert max(map(cell_len, text.splitlines())) <= 80


def test_wrong_samples_and_those_of_a_filter_and_a_step_are_listed(shown, runs) -> None:
    assert heads(shown(runs / "first", "--wrong")) == ["3.0", "3.1", "0.1", "1.0", "1.1"]
    assert heads(shown(runs / "first", "--wrong", "--step", "0", "--filter", "source=sums")) == ["0.1"]
    assert heads(shown(runs / "first", "--filter", "dropped", "--limit", "1")) == ["3.0"]
    assert "no sample is like that" in shown(runs / "first", "--filter", "reward>1")


def test_samples_of_a_group_are_found_and_one_sample_is_not_asked_for_twice(shown, refused, runs) -> None:
    assert heads(shown(runs / "first", "--group", "3", "--worst")) == ["3.0", "3.1"]
    assert "--sample is one sample; leave out --wrong" in refused(runs / "first", "--sample", "3.1", "--wrong")


def test_samples_are_json_too(shown, runs) -> None:
    view = json.loads(shown(runs / "first", "--worst", "1", "--json"))
    (sample,) = view["samples"]
    assert (sample["step"], sample["group_index"], sample["member"], view["has_more"]) == (1, 3, 0, True)
    assert (sample["correct"], sample["label"], sample["drop_reason"]) == ("no", "four", "zero_std_0.0")


def test_one_sample_is_shown_whole_with_its_tokens_in_parts(shown, runs) -> None:
    text = shown(runs / "first", "--sample", "2.1")
    assert f"<user>{LONG}What is 2?\n" in text
    assert f"{LONG}so it is 1\n" in text
    assert "advantage -0.5" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0-1", "trained", "on", "1", "-2.000", "-3.000"] in rows
    assert ["2-3", "not", "trained", "on", "1", "0.000", "0.000"] in rows
    assert ["4-4", "trained", "on", "1", "-0.500", "-0.500"] in rows
    assert ["5-5", "trained", "on", "2", "-0.500", "-0.500"] in rows
    assert 'metadata of its own {"num_turns": 2}' in text
    assert "detail: compared" in text
    view = json.loads(shown(runs / "first", "--sample", "2.1", "--json"))
    (sample,) = view["samples"]
    assert (sample["member"], sample["advantage"], len(sample["parts"])) == (1, -0.5, 4)


def test_a_dropped_sample_says_why_and_has_no_advantage(shown, runs) -> None:
    text = shown(runs / "first", "--sample", "1.0")
    assert text.startswith("group 1 of step 0, dropped: zero_std_0.0\n")
    assert "advantage" not in text


def test_runs_of_a_folder_are_listed_and_a_damaged_one_says_so(shown, runs) -> None:
    text = shown(runs)
    rows = [line.split() for line in text.splitlines()]
    assert ["first", "finished", "2", "0.500", "->", "0.600", "-", "0", "s"] in rows
    assert ["rates/second", "finished", "4", "0.500", "->", "0.800", "-", "0", "s"] in rows
    assert ["third", "unreadable", "-", "-", "-", "-"] in rows
    assert "wrong checksum" in " ".join(text.split())
    assert "3 runs in " in text
    assert "the newest 1 of them shown" in " ".join(shown(runs, "--limit", "1").split())
    listed = json.loads(shown(runs, "--json"))["runs"]
    assert [(each["name"], each["status"], each.get("steps")) for each in listed] == [
        ("first", "finished", 2),
        ("rates/second", "finished", 4),
        ("third", "unreadable", None),
    ]


def test_names_that_are_told_apart_by_their_beginning_are_listed_longer(shown, runs, tmp_path) -> None:
    names = [f"seed={seed},learning_rate=1e-3,divide_by_std=true" for seed in range(2)]
    for name in names:
        shutil.copytree(runs / "first", tmp_path / name)
    lines = shown(tmp_path).splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [[name, "finished"] for name in names]
    assert lines[1].endswith("0.500 -> 0.600")
    assert max(map(cell_len, lines)) <= 80


def test_evaluations_are_listed_beside_runs_and_not_compared_here(shown, refused, runs, tmp_path) -> None:
    shutil.copytree(runs / "first", tmp_path / "run")
    make_evaluation(tmp_path / "eval")
    rows = [line.split() for line in shown(tmp_path).splitlines()]
    assert ["eval", "evaluation", "-", "-", "50.0%", "-"] in rows
    assert "rollfeed eval --compare A B" in refused(tmp_path / "run", tmp_path / "eval")


def test_runs_side_by_side_have_the_settings_that_differ_and_their_figures(shown, runs) -> None:
    text = shown(runs / "first", runs / "rates" / "second")
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == ["first", "second"]
    assert ["train.optimizer.learning_rate"[-25:].rjust(26, "…"), "1e-06", "2e-06"] in rows
    assert ["steps", "2", "4"] in rows
    assert ["loss,", "last", "batch", "-", "0.2500"] in rows
    assert "seed" not in text
    assert max(map(cell_len, text.splitlines())) <= 80
    view = json.loads(shown(runs / "first", runs / "rates" / "second", "--json"))
    assert view["settings"] == {"train.optimizer.learning_rate": [1e-6, 2e-6]}
    assert [each["steps"] for each in view["runs"]] == [2, 4]


def test_a_table_that_one_run_has_is_one_line(shown, runs, tmp_path) -> None:
    with RunDirectory.open(tmp_path / "bare", settings={"seed": 3}, identity={"seed": 3}, overwrite=False):
        pass
    view = json.loads(shown(runs / "first", tmp_path / "bare", "--json"))
    assert view["settings"] == {"train": ["set", None], "rollout": ["set", None]}


def test_many_runs_are_compared_in_several_tables(shown, runs, tmp_path) -> None:
    for number in range(6):
        shutil.copytree(runs / "first", tmp_path / f"run-{number}")
    text = shown(tmp_path, "--compare")
    names = [line.split() for line in text.splitlines() if "run-" in line]
    assert names == [["run-0", "run-1", "run-2", "run-3"], ["run-4", "run-5"]]
    assert max(map(cell_len, text.splitlines())) <= 80


def test_a_training_is_shown_with_loss_and_gradient_and_what_goes_wrong(shown, runs) -> None:
    text = shown(runs / "rates" / "second")
    rows = [line.split() for line in text.splitlines()]
    assert ["3", "1", "1", "0.800", "100%", "0.2500", "1.5", "12"] in rows
    assert "advice: 100% of answers cut off for 4 steps (0 to 3)" in text
    view = json.loads(shown(runs / "rates" / "second", "--json"))
    assert [each["name"] for each in view["advice"]] == ["truncated"]
    assert view["steps"][3]["train"]["train/loss"] == 0.25


def make_evaluation(folder: Path, **changed: Any) -> Path:
    rows = [
        {
            **{"set": "sums", "index": index, "answer": answer, "prompt_id": f"sums/{index}", "prompt": f"Q{index}"},
            **{"label": '"4"', "response": f"A{answer}", "status": "completed", "response_length": 5},
            **{"reward": float(answer), "correct": bool(answer), "extracted": str(answer), "error": None},
        }
        for index in range(2)
        for answer in range(2)
    ]
    found = {"num_prompts": 2, "n_samples_per_prompt": 2, "accuracy": 0.5, "accuracy_low": 0.1, "accuracy_high": 0.9}
    result = {"model": "tiny", "sets": {"sums": {**found, "reward_mean": 0.5}}, **changed}
    folder.mkdir()
    (folder / "eval.json").write_text(json.dumps(result))
    pq.write_table(pa.Table.from_pylist(rows), folder / "answers.parquet")
    return folder


def test_an_evaluation_is_shown_with_its_sets_and_its_wrong_answers(shown, refused, tmp_path) -> None:
    folder = make_evaluation(tmp_path / "eval")
    text = shown(folder)
    assert "sums: 2 prompts x 2 answers\n  accuracy 50.0% (10.0% to 90.0%), reward 0.5000\n" in text
    assert json.loads(shown(folder, "--json"))["model"] == "tiny"
    wrong = [line for line in shown(folder, "--wrong").splitlines() if line.endswith("wrong")]
    assert wrong == [f"{index}.0, sums, completed, 5 tokens, reward 0, wrong" for index in range(2)]
    whole = shown(folder, "--sample", "1.1")
    assert "1.1, sums, completed, 5 tokens, reward 1, right\n" in whole
    assert "-- answered\nA1\n" in whole
    assert "1.0" not in whole
    assert "has no answer 1.2" in refused(folder, "--sample", "1.2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--filter", "rewrd<1"), "no field 'rewrd'; did you mean reward?"),
        (("--sample", "2"), "--sample 2: write it as GROUP.MEMBER, such as 5.0"),
        (("--sample", "2.7"), "group 2 of step 1 has no member 7; it has members 0 to 1"),
        (("--sample", "9.0"), "no step has group 9"),
        (("--compare",), "is no folder of runs; give several directories"),
    ],
)
def test_what_is_not_in_a_run_is_refused_in_one_line(refused, runs, arguments, message) -> None:
    assert message in refused(runs / "first", *arguments)


def test_what_looks_into_one_run_is_refused_for_several(refused, runs) -> None:
    assert "--wrong: looks into one run; give its directory alone" in refused(runs, "--wrong")
    assert "--group: looks into one run" in refused(runs / "first", runs / "third", "--group", "1")
    assert "steps.jsonl: is damaged" in refused(runs / "third")
    assert "frist: does not exist" in refused(runs / "first", runs / "frist")


def test_a_folder_without_runs_and_a_damaged_evaluation_are_refused_in_one_line(refused, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no run and no evaluation in it" in refused(tmp_path / "empty")
    assert "--step: an evaluation has none" in refused(make_evaluation(tmp_path / "eval"), "--step", "1")
    assert "eval.json: cannot be read" in refused(make_evaluation(tmp_path / "odd", sets=None))


@pytest.mark.parametrize("name", ["train.jsonl", "eval.jsonl"])
@pytest.mark.parametrize("line", ["[]", "{}", '{"step": 0, "sets": 1, "train/loss": "a"}', '{"sets": {"a": {}}}', "no"])
def test_lines_of_something_else_are_told_as_damage(capsys, runs, tmp_path, name, line) -> None:
    shutil.copytree(runs / "first", tmp_path / "run")
    (tmp_path / "run" / name).write_text(f"{line}\n")
    for arguments in ((), ("--json",)):
        code = main(["show", str(tmp_path / "run"), *arguments])
        told = capsys.readouterr().err.splitlines()
        assert (code, len(told)) in {(0, 0), (2, 1)}  # half a line is one that is being written
        assert all(f"{name}: is damaged" in each for each in told)
        assert (code == 0) == (line == "no")


def test_an_evaluation_of_a_set_without_figures_is_told_as_damage(refused, runs, tmp_path) -> None:
    shutil.copytree(runs / "first", tmp_path / "run")
    (tmp_path / "run" / "eval.jsonl").write_text('{"step": 0, "accuracy": 0.5, "sets": {"sums": {"accuracy": 0.5}}}\n')
    assert "eval.jsonl: is damaged" in refused(tmp_path / "run")


def test_texts_are_cut_and_filled_by_the_columns_that_they_take() -> None:
    assert [fitted("漢字漢字", 5), fitted("漢字", 6), fitted("abc", 2), fitted("a", 3, is_left=False)] == [
        "漢字…",
        "漢字  ",
        "a…",
        "  a",
    ]
