from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.cli.main import main

CASES = Path(__file__).parents[2] / "cases" / "reward_cases.jsonl"
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
    code, printed, _ = score(CASES, "--out", out, "--json")
    assert code == 0
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [result["id"] for result in results] == [case["id"] for case in cases]
    remote = [case["id"] for case in cases if case["rm_type"] == "remote_rm"]
    assert [result["id"] for result in results if result["outcome"] != "ok"] == remote
    assert json.loads(printed)["ok"] == 188
    for case, result in zip(cases, results, strict=True):
        assert result["seconds"] <= case["max_seconds"], case["id"]
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
        assert process.wait(timeout=10) == 130
        assert process.stderr.read().splitlines() == ["rollfeed: interrupted"]
    assert list(tmp_path.iterdir()) == [path]
