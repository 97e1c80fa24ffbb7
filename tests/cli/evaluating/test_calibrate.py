from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollfeed.cli.main import main


def test_calibrate_gives_accuracy_by_level(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["env", "calibrate", "core/reverse_text", "--levels", "3", "0", "--samples", "4", "--json"]
    options = ["--model", str(tiny_checkpoint), "--max-response-len", "4", "--threads", "1"]
    parameters = ["--parameter", "style=compact", "--parameter", "alphabet_size=10", "--no-chat-template"]
    assert main([*command, *options, *parameters]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [level["level"] for level in found["levels"]] == [0, 3]
    assert [level["num_prompts"] for level in found["levels"]] == [4, 4]
    assert all(level["accuracy_low"] <= level["accuracy"] <= level["accuracy_high"] for level in found["levels"])
    assert found["parameters"] == {"style": "compact", "alphabet_size": 10}
    assert found["recommended"] in (None, 0, 3)


def test_calibrate_says_what_it_recommends(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--samples", "2", "--model", str(tiny_checkpoint), "--max-response-len", "2", "--threads", "1"]
    assert main(["env", "calibrate", "core/add_numbers", "--levels", "9", *options]) == 0
    assert "no level of core/add_numbers has an accuracy of 5 to 60 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["core/add_number"], "core/add_numbers"),
        (["core/add_numbers", "--levels", "41"], "--levels 41: the levels of environment core/add_numbers are 0 to 40"),
        (["core/add_numbers", "--levels", "-1"], "--levels -1"),
        (["core/add_numbers", "--samples", "0"], "--samples 0"),
        (["core/add_numbers", "--temperature", "0"], "--temperature 0.0"),
        (["core/add_numbers", "--max-response-len", "0"], "--max-response-len 0"),
        (["core/add_numbers", "--threads", "-1"], "--threads -1"),
        (["core/add_numbers", "--parameter", "terms"], "--parameter 'terms'"),
        (["core/add_numbers", "--parameter", "terms=3"], "has no parameters"),
        (["core/reverse_text", "--parameter", "alphabet_size=one"], "alphabet_size = 'one'"),
    ],
)
def test_mistakes_are_one_line(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["env", "calibrate", *arguments, "--model", str(tiny_checkpoint)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
