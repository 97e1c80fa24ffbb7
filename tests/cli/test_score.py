from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.cli.main import main

CASES = Path(__file__).parents[1] / "cases" / "reward_cases.jsonl"
ROW = '{"id": "a", "rm_type": "math", "response": "It is \\\\boxed{4}.", "label": "4"}\n'


@pytest.fixture
def score(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return the function that runs ``rollfeed score`` and gives exit code, output and errors."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = main(["score", *map(str, arguments)])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_cases_are_all_graded_with_exit_code_0(score: Any, leaves_no_process: None, tmp_path: Path) -> None:
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    out = tmp_path / "out.jsonl"
    code, printed, _ = score(CASES, "--out", out, "--timeout", 60, "--json")
    assert code == 0
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [result["id"] for result in results] == [case["id"] for case in cases]
    remote = [case["id"] for case in cases if case["rm_type"] == "remote_rm"]
    assert [result["id"] for result in results if result["outcome"] != "ok"] == remote
    assert json.loads(printed)["ok"] == 188
    for case, result in zip(cases, results, strict=True):
        if isinstance(case["expected"], int | float) and case["id"] not in remote:
            assert result["reward"] == case["expected"], case["id"]


def test_result_is_told_on_one_line(score: Any, tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(ROW + '{"rm_type": "math"}\n')
    code, printed, err = score(path, "--out", out, "--quiet")
    assert code == 0
    assert printed.startswith(f"2 rows in {out}: 1 graded, 1 errors, 0 timeouts, in ")
    assert err == ""


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--rm-type", ""), "--rm-type"),
        (("--rm-type", "maths"), "did you mean math?"),
        (("--remote-url", "host:1"), "--remote-url host:1"),
        (("--workers", "0"), "--workers 0"),
        (("--timeout", "nan"), "--timeout nan"),
        (("--isolation", "none"), "--isolation none"),
        (("--settings", "missing.toml"), "missing.toml"),
    ],
)
def test_wrong_option_is_refused_in_one_line(score: Any, tmp_path: Path, options: tuple[str, str], cause: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(ROW)
    code, _, err = score(path, "--out", tmp_path / "out.jsonl", *options)
    assert code == 2
    assert cause in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_file_that_is_not_jsonl_is_refused_with_its_line(score: Any, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(ROW + "id,response\n")
    code, _, err = score(path, "--out", tmp_path / "out.jsonl")
    assert code == 2
    assert "line 2: not JSON" in err
    assert len(err.splitlines()) == 1
    assert score(path)[0] == 2
    assert score(tmp_path / "missing.jsonl", "--out", tmp_path / "out.jsonl")[0] == 2


def test_help_has_an_example_that_works(score: Any, tmp_path: Path) -> None:
    code, printed, _ = score("--help")
    assert code == 0
    assert "example: rollfeed score responses.jsonl --out rewards.jsonl" in printed
    line = next(line for line in printed.splitlines() if line.strip().startswith('{"id": "a", "rm_type"'))
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(line)
    assert score(path, "--out", out)[0] == 0
    result = json.loads(out.read_text())
    assert (result["id"], result["reward"], result["extracted"]) == ("a", 1.0, "4")


def test_rows_keep_their_order_and_their_ids_whatever_these_are(score: Any, tmp_path: Path) -> None:
    ids: list[Any] = ["same", "same", 3, None, ["a"], {"b": 1}, "", "\u00e9\n"]
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": each, "rm_type": "math", "response": rf"\boxed{{{n}}}", "label": "1"} for n, each in enumerate(ids)]
    rows.append({"rm_type": "math", "response": r"\boxed{1}", "label": "1", "unknown": 1})
    path.write_text("\n\n".join(map(json.dumps, rows)))
    assert score(path, "--out", out)[0] == 0
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [result["id"] for result in results] == [*ids, None]
    assert [result["reward"] for result in results] == [0.0, 1.0, *[0.0] * 6, 1.0]


def test_row_that_takes_long_does_not_change_the_order(score: Any, tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    program = "```python\nimport time\ntime.sleep(0.3)\nprint(5)\n```"
    slow = {"rm_type": "livecodebench", "response": program, "label": {"inputs": [""], "outputs": ["5"]}}
    quick = {"rm_type": "exact", "response": "no", "label": "yes"}
    path.write_text("".join(json.dumps({"id": n, **(quick if n % 3 else slow)}) + "\n" for n in range(9)))
    assert score(path, "--out", out)[0] == 0
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(result["id"], result["reward"]) for result in results] == [(n, float(n % 3 == 0)) for n in range(9)]


def test_file_without_rows_gives_one_without_rows(score: Any, tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("\n  \n")
    code, printed, _ = score(path, "--out", out)
    assert (code, out.read_text()) == (0, "")
    assert printed.startswith("0 rows in ")


def test_result_that_exists_is_replaced(score: Any, tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(ROW)
    out.write_text("old\n" * 100)
    assert score(path, "--out", out)[0] == 0
    assert len(out.read_text().splitlines()) == 1


@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
def test_file_that_is_read_is_not_written_over(score: Any, tmp_path: Path, link: str | None) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "in.jsonl"
    path.write_text(ROW)
    if link is not None:
        out = tmp_path / "out.jsonl"
        getattr(out, link)(path)
    code, _, err = score(path, "--out", out)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "choose another --out" in err
    assert path.read_text() == ROW


def test_pipe_which_cannot_be_read_twice_is_refused(score: Any, tmp_path: Path) -> None:
    pipe, out = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        code, _, err = score(path, "--out", out)
        assert (code, len(err.splitlines())) == (2, 1)
        assert "is not a plain file" in err
    assert not out.exists()


def test_disk_that_is_full_is_told_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(ROW * 200)
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))\n"
        "from rollfeed.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", limited, "score", str(path), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"rollfeed: {out}: cannot be written: File too large; choose another --out\n"
    assert list(tmp_path.iterdir()) == [path]


def test_progress_is_on_standard_error_and_not_in_the_output(tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    program = "```python\nimport time\ntime.sleep(0.3)\nprint(5)\n```"
    row = {"rm_type": "livecodebench", "response": program, "label": {"inputs": [""], "outputs": ["5"]}}
    path.write_text((json.dumps(row) + "\n") * 5)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rollfeed", "score", str(path), "--out", str(out), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        printed, _ = process.communicate()
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert process.returncode == 0
    assert " of 5 rows, 0 failed, " in shown
    assert json.loads(printed)["rows"] == 5


@pytest.mark.parametrize("signals", [[signal.SIGINT] * 3, [signal.SIGTERM]], ids=["impatient", "SIGTERM"])
def test_however_it_is_told_to_end_it_leaves_nothing(
    leaves_no_process: None, tmp_path: Path, signals: list[signal.Signals]
) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    program = "```python\nimport os, time\nos.fork()\ntime.sleep(600)\n```"
    row = {"rm_type": "livecodebench", "response": program, "label": {"inputs": [""], "outputs": ["1"]}}
    path.write_text((json.dumps(row) + "\n") * 4)
    out.write_text("old")
    command = [sys.executable, "-m", "rollfeed", "score", str(path), "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process, process.stderr:
        assert "isolation level" in process.stderr.readline()
        for number in signals:
            process.send_signal(number)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read().splitlines() == ["rollfeed: interrupted"]
    assert sorted(tmp_path.iterdir()) == [path, out]
    assert out.read_text() == "old"


def test_ctrl_c_ends_it_at_once_and_leaves_nothing(leaves_no_process: None, tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    endless = {"rm_type": "livecodebench", "response": "```python\nwhile True: pass\n```"}
    tests = {"inputs": ["", ""], "outputs": ["1", "1"]}
    path.write_text((json.dumps({**endless, "label": tests}) + "\n") * 8)
    command = [sys.executable, "-m", "rollfeed", "score", str(path), "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process, process.stderr:
        assert "isolation level" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read().splitlines() == ["rollfeed: interrupted"]
    assert list(tmp_path.iterdir()) == [path]


FUNCTIONS = """
def length(sample, prompt):
    return float(len(sample.response))


async def shaped(sample, prompt):
    return {"score": 0.5, "acc": sample.response == prompt.label, "pred": sample.response}


def of_batch(samples, prompts):
    return [prompt.metadata["worth"] for prompt in prompts]


def of_group(samples, prompt):
    return [1.0] * len(samples)


def broken(sample, prompt):
    raise ValueError("no idea")
"""


@pytest.fixture
def scored(score: Any, tmp_path: Path) -> Callable[..., tuple[list[Any], str]]:
    """Return the function that scores rows with a settings file, and gives rewards and output; functions are there."""
    (tmp_path / "own_rewards.py").write_text(FUNCTIONS)

    def run(rows: list[dict[str, Any]], settings: str | None, *options: Any) -> tuple[list[Any], str]:
        path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if settings is not None:
            (tmp_path / "score.toml").write_text(settings)
            options = ("--settings", tmp_path / "score.toml", *options)
        code, printed, err = score(path, "--out", out, "--quiet", *options)
        assert code == 0, err
        return [json.loads(line)["reward"] for line in out.read_text().splitlines()], printed

    return run


MATH = {"response": r"\boxed{4}", "label": "4"}


def test_table_reward_alone_is_enough(scored: Any) -> None:
    assert scored([MATH], '[reward]\nrm_type = "math"\n')[0] == [1.0]
    assert scored([{**MATH, "rm_type": "exact"}], "")[0] == [1.0]


def test_table_that_is_misspelt_is_refused(score: Any, tmp_path: Path) -> None:
    path, settings = tmp_path / "in.jsonl", tmp_path / "score.toml"
    path.write_text(ROW)
    settings.write_text('[rewards]\nrm_type = "math"\n')
    code, _, err = score(path, "--out", tmp_path / "out.jsonl", "--settings", settings)
    assert (code, err) == (2, f"rollfeed: {settings}: rewards: unknown setting; did you mean reward?\n")


def test_functions_of_a_settings_file_score_as_in_a_run(scored: Any) -> None:
    chosen = {"response": "abc", "label": "abc", "metadata": {"reward_fn": "long"}}
    rows = [chosen, {**chosen, "metadata": json.dumps(chosen["metadata"])}, {**MATH, "rm_type": "math"}]
    assert scored(rows, '[reward.functions]\nlong = "own_rewards:length"\n')[0] == [3.0, 3.0, 1.0]
    settings = '[reward]\nreward_key = "{}"\n[reward.functions]\nlong = "own_rewards:length"\n'
    settings += '[plugins]\nreward = "own_rewards:shaped"\n'
    rewards, printed = scored([*rows, {"response": "a", "label": "a"}], settings.format("acc"))
    assert rewards == [3.0, 3.0, 0.0, 1.0]  # a function goes before rm_type
    assert scored(rows, settings.format("score"))[0] == [3.0, 3.0, 0.5]
    assert "  long " in printed
    assert "  own_rewards:shaped  2 graded, 0 errors, 0 timeouts; mean reward 0.5000, 50.0% correct" in printed
    worths = [{"response": "a", "label": "a", "metadata": {"worth": n}} for n in range(3)]
    assert scored(worths, '[plugins]\nbatched_reward = "own_rewards:of_batch"\n')[0] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("in_workers", ["true", "false"])
def test_rm_type_of_the_command_line_may_be_a_function(
    scored: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_workers: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"response": "abc", "label": "x"}, {**MATH, "rm_type": "math"}]
    settings = f"[reward]\nfunctions_in_workers = {in_workers}\n"
    for given in (None, settings):
        rewards, printed = scored(rows, given, "--rm-type", "own_rewards:length")
        assert rewards == [3.0, 1.0]
        assert "  own_rewards:length  1 graded" in printed


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (None, ["--rm-type", "own_rewards:nothing"], "rm_type = 'own_rewards:nothing': own_rewards has no 'nothing'"),
        (None, ["--rm-type", "no_such_module:f"], "rm_type = 'no_such_module:f'"),
        ('[plugins]\nreward = "own_rewards:none"\n', [], "plugins.reward = 'own_rewards:none'"),
        ('[plugins]\ngroup_reward = "own_rewards:of_group"\n', [], "it scores groups, and responses are graded one by"),
    ],
)
def test_function_that_cannot_score_rows_is_refused(
    scored: Any,
    score: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: str | None,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "in.jsonl"
    path.write_text(ROW)
    if settings is not None:
        (tmp_path / "score.toml").write_text(settings)
        options = ["--settings", "score.toml"]
    code, _, err = score(path, "--out", tmp_path / "out.jsonl", *options)
    assert (code, len(err.splitlines())) == (2, 1)
    assert message in err


def test_numbers_are_told_whole_and_by_grader(scored: Any, score: Any, tmp_path: Path) -> None:
    rows = [
        {**MATH, "rm_type": "math"},
        {**MATH, "rm_type": "math", "label": "5"},
        {**MATH, "rm_type": "math", "label": None},
        {"rm_type": "dapo", "response": "Answer: 4", "label": "5"},
        {"response": "x"},
        {**MATH, "metadata": {"rm_type": "exact"}, "rm_type": "math"},
    ]
    _, printed = scored(rows, None)
    first, *lines = printed.splitlines()
    assert first.startswith(f"6 rows in {tmp_path / 'out.jsonl'}: 4 graded, 2 errors, 0 timeouts, in ")
    assert lines == [
        "mean reward 0.2500, 50.0% correct",
        "  no grader  0 graded, 1 errors, 0 timeouts",
        "  dapo       1 graded, 0 errors, 0 timeouts; mean reward -1.0000, 0.0% correct",
        "  exact      1 graded, 0 errors, 0 timeouts; mean reward 1.0000, 100.0% correct",
        "  math       2 graded, 1 errors, 0 timeouts; mean reward 0.5000, 50.0% correct",
    ]
    told = json.loads(scored(rows, None, "--json")[1])
    assert (told["rows"], told["ok"], told["reward_mean"], told["correct_ratio"]) == (6, 4, 0.25, 0.5)
    assert told["by_grader"]["dapo"] == {
        "ok": 1, "error": 0, "timeout": 0, "reward_mean": -1.0, "correct_ratio": 0.0
    }  # fmt: skip


def test_strict_exits_with_1_when_a_row_could_not_be_graded(score: Any, tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(ROW)
    assert score(path, "--out", out, "--strict")[0] == 0
    path.write_text(ROW + '{"rm_type": "math"}\n')
    assert score(path, "--out", out)[0] == 0
    code, printed, _ = score(path, "--out", out, "--strict")
    assert code == 1
    assert printed.startswith("2 rows in ")
    assert len(out.read_text().splitlines()) == 2
