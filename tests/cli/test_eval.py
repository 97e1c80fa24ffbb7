from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rollfeed.cli.main import main
from rollfeed.environments import EnvironmentRegistry, make_task

Write = Callable[..., Path]


def test_eval_measures_all_sets_and_stores_every_answer(
    settings_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["eval", str(settings_file()), "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["sets"]) == ["core/reverse_text@2", "questions"]
    assert printed["sets"]["core/reverse_text@2"]["n_samples_per_prompt"] == 2
    stored = json.loads((out / "eval.json").read_text())
    assert {**stored, "out": str(out)} == printed
    rows = pq.read_table(out / "answers.parquet").to_pylist()
    assert [row["set"] for row in rows] == ["core/reverse_text@2"] * 6 + ["questions"] * 3
    assert all(row["prompt"].startswith("rev:") for row in rows[:6])


def test_two_evaluations_have_the_same_answers(settings_file: Write, tmp_path: Path) -> None:
    tables = []
    for name, seed in (("a", 3), ("b", 4)):
        command = ["eval", str(settings_file()), "--out", str(tmp_path / name), "--set", f"seed={seed}", "--quiet"]
        assert main([*command, "--set", "rollout.deterministic=true"]) == 0
        tables.append((tmp_path / name / "answers.parquet").read_bytes())
    assert tables[0] == tables[1]


def test_text_output_names_accuracy_and_interval(
    settings_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(settings_file()), "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "core/reverse_text@2: 3 prompts x 2 answers"
    assert lines[1].startswith("  accuracy   ")
    assert "questions: 3 prompts x 1 answers" in lines
    assert lines[-1].endswith(f"results are in {tmp_path / 'out'}")


def test_results_are_not_overwritten_unless_asked_to(
    settings_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(settings_file()), "--out", str(tmp_path / "out"), "--set", "eval.num_prompts=1"]
    assert main(command) == 0
    before = (tmp_path / "out" / "eval.json").read_bytes()
    capsys.readouterr()
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "out" / "eval.json").read_bytes() == before
    assert main([*command, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('eval.datasets.0.label_key=""', "eval.datasets.0.label_key"),
        ("eval.datasets.0.temprature=1", "did you mean temperature?"),
        ("eval.datasets.0.rm_type=mathe", "did you mean math?"),
        ("eval.environments.0.id=core/reverse", "core/reverse_text"),
        ("eval.environments.0.parameters.style=plain", "style = 'plain'"),
        ("eval.max_response_len=400", "leaves 0 of 384 tokens"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    settings_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert main(["eval", str(settings_file()), "--out", str(tmp_path / "out"), "--set", override]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_set_without_labels_is_refused_before_the_engine_starts(
    settings_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = settings_file('[[eval.datasets]]\npath = "questions.jsonl"\nname = "bare"\nrm_type = "math"\n')
    assert main(["eval", str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error == (
        "rollfeed: eval set bare, prompt bare/0: has no label, and rm_type 'math' needs one: set label_key of the set\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_file_without_sets_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\ncheckpoint = "{tiny_checkpoint}"\n[[prompts.environments]]\nid = "core/copy_text"\n')
    assert main(["eval", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "add [[eval.datasets]] or [[eval.environments]]" in capsys.readouterr().err


def test_an_evaluation_whose_answers_all_fail_ends_with_1(
    settings_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("async def score(sample, prompt):\n    raise ValueError('broken')\n")
    path = settings_file('[reward]\noverride_environments = true\n[plugins]\nreward = "broken:score"\n')
    code = main(["eval", str(path), "--out", str(tmp_path / "out"), "--set", "rollout.failure_minimum=3"])
    assert code == 1
    assert "more than rollout.failure_budget = 0.1" in capsys.readouterr().err


def test_check_looks_at_the_sets_too(settings_file: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = settings_file('[[prompts.environments]]\nid = "core/copy_text"\n')
    assert main(["check", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval_sets"] == ["core/reverse_text@2", "questions"]
    assert main(["check", str(path), "--set", "eval.datasets.0.rm_type=mathe"]) == 2
    assert "did you mean math?" in capsys.readouterr().err


def test_check_tells_of_evaluation_prompts_that_are_trained_on(
    settings_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"question {number}", "answer": "x"} for number in (9, 1, 4, 1)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = settings_file(
        '[reward]\nrm_type = "exact"\n[[prompts.datasets]]\npath = "train.jsonl"\nlabel_key = "answer"\n'
        '[[prompts.environments]]\nid = "core/add_numbers"\n'
    )
    assert main(["check", str(path), "--json", "--set", "eval.num_prompts=5"]) == 0
    reverse, questions = json.loads(capsys.readouterr().out)["overlap"]
    assert (reverse["eval_set"], reverse["num_common"], reverse["example"]) == ("core/reverse_text@2", 0, None)
    assert (questions["num_prompts"], questions["num_common"], questions["share"]) == (5, 2, 0.4)
    assert questions["example"] == ["questions/1", "train/1"]
    assert main(["check", str(path), "--set", "eval.num_prompts=5"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("overlap")]
    assert told[0].startswith("overlap  core/reverse_text@2: none of 5 prompts is among the ")
    assert told[1].startswith("overlap  questions: 2 of 5 prompts (40.0%) are among the ")
    assert "questions/1 is train/1, " in told[1]
    assert "question 1" in told[1]


def test_check_tells_of_problems_that_an_environment_and_a_data_set_share(
    settings_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = EnvironmentRegistry().get("core/add_numbers")
    text = make_task(environment, level=0, index=0, run_seed=0).question
    (tmp_path / "questions.jsonl").write_text("")
    path = settings_file('[[prompts.environments]]\nid = "core/add_numbers"\n')
    (tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": text, "answer": "1"}) + "\n")
    trained = ["eval.environments=[]", "eval.num_prompts=1"]
    assert main(["check", str(path), "--json", *(part for each in trained for part in ("--set", each))]) == 0
    (found,) = json.loads(capsys.readouterr().out)["overlap"]
    assert (found["num_common"], found["example"][0]) == (1, "questions/0")
    assert found["example"][1].startswith("core/add_numbers@0/train/")


def test_check_and_eval_count_what_a_set_has(settings_file: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = settings_file('[[eval.environments]]\nid = "core/add_numbers"\n')
    assert main(["check", str(path), "--json", "--set", "eval.num_prompts=50"]) == 0
    counts = json.loads(capsys.readouterr().out)["eval_prompts"]
    few = counts["core/add_numbers@0"]
    assert few["num_missing"] == 50 - few["num_prompts"] > 0
    assert counts["questions"] == {"num_prompts": 5, "num_missing": 45, "num_repeats": 0, "num_over_length": 0}
    assert main(["check", str(path), "--set", "eval.num_prompts=50"]) == 0
    told = capsys.readouterr().out
    assert f"core/add_numbers@0 ({few['num_prompts']} prompts; {few['num_missing']} fewer than asked for" in told


def test_slime_s_sets_and_flags_measure_and_two_results_are_compared(
    settings_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, sets = settings_file(), tmp_path / "eval.yaml"
    sets.write_text(
        "eval:\n  defaults: {label_key: answer, apply_chat_template: false}\n"
        "  datasets: [{name: asked, path: questions.jsonl, rm_type: exact, metadata_overrides: {a: 1}}]\n"
    )
    for name, seed in (("a", 1), ("b", 2)):
        command = ["eval", str(file), "--eval-config", str(sets), "--n-samples-per-eval-prompt", "2", "--quiet"]
        out = ["--out", str(tmp_path / name), "--set", f"eval.seed={seed}", "--set", "eval.environments=[]"]
        assert main([*command, *out]) == 0
    assert "eval.yaml:3: metadata_overrides: metadata is that of the rows" in capsys.readouterr().err
    assert main(["eval", "--compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sets"]["asked"]
    assert (found["num_prompts"], found["num_unpaired"]) == (3, 0)
    assert found["low"] <= found["change"] <= found["high"]
    assert main(["eval", "--compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert "asked: 3 prompts in both" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give a settings file, or --compare and two runs"),
        (["run.toml", "--compare", "a", "b"], "--compare takes two runs and no settings file"),
        (["--compare", "a", "b"], "a: no answers.parquet"),
        (["run.toml", "--eval-top-k", "x"], "--eval-top-k x: is not an integer"),
    ],
)
def test_arguments_that_do_not_go_together_are_one_line(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *arguments]) == 2
    printed = capsys.readouterr().err
    assert problem in printed
    assert printed.count("\n") == 1
