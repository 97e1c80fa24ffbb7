from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollfeed.cli.main import main
from rollfeed.environments import EnvironmentRegistry


def test_all_built_in_environments_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "core/*", "--problems", "5", "--timeout", "240", "--quiet", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    ids = [each for each in EnvironmentRegistry().ids() if each.startswith("core/")]
    assert [each["id"] for each in report["environments"]] == ids
    assert (report["passed"], report["failed"], report["quarantined"]) == (len(ids), 0, 0)
    for each in report["environments"]:
        assert [level["level"] for level in each["levels"]][:5] == [0, 1, 2, 4, 8]
        assert all(
            level["outcome"] == "passed" and level["reads"] == ["plain", "tags", "boxed"] for level in each["levels"]
        )


PUZZLE = """
from rollfeed.types import Verdict
class Puzzle:
    environment_id, version, summary, max_level = "my/puzzle", 2, "Yes.", 3
    def make(self, level, random):
        return f"Is {random.random()} a number?", {}, "yes"
    def verify(self, params, response):
        return Verdict.graded(response != "no", reward=None)
"""


def test_broken_environment_by_path_is_told_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(PUZZLE)
    monkeypatch.chdir(tmp_path)
    assert main(["env", "check", "mine.py:Puzzle", "--levels", "1", "7"]) == 1
    shown = capsys.readouterr().out
    assert "failed       my/puzzle" in shown
    assert "    level 1 failed: what is no answer is right: ''" in shown
    assert "level 7" not in shown
    assert shown.endswith("1 environment: 0 passed, 0 quarantined, 1 failed\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the environments to check, or give --all"),
        (["core/copy_text", "--all"], "name the environments to check, or give --all"),
        (["core/copy_tex"], "core/copy_text"),
        (["nobody/*"], "there is none"),
        (["core/copy_text", "--problems", "0"], "--problems 0"),
        (["core/copy_text", "--timeout", "-1"], "--timeout -1"),
        (["core/copy_text", "--workers", "0"], "--workers 0"),
        (["core/copy_text", "--levels", "-2"], "--levels -2"),
    ],
)
def test_mistakes_are_one_line_and_end_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["env", "check", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
