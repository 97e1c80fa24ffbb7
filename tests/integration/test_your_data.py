"""What docs/your-data.md shows is what happens: its files are written, and its commands run, in an empty folder."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "your-data.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
Rollfeed = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files of the page, which is the current one."""
    for block in BLOCK.finditer(PAGE):
        if block[1] in ("csv", "python", "toml"):
            name = re.findall(r"`([\w.]+)`", PAGE[: block.start()].rstrip().rpartition("\n\n")[2])[-1]
            (tmp_path / name).write_text(block[2])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands() -> list[list[str]]:
    lines = [line for kind, text in BLOCK.findall(PAGE) if not kind for line in text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("rollfeed ")]


def test_the_page_runs(folder: Path, rollfeed: Rollfeed) -> None:
    said = {}
    for command in commands():
        ran = rollfeed(*command)
        assert ran.code == 0, (command, ran.err)
        said[" ".join(command)] = ran.out
    assert len(said) >= 10
    shown = next(text for kind, text in BLOCK.findall(PAGE) if kind == "text")
    assert shown in said["check run.toml"]
    printed = (folder / "runs" / "sums" / "rewards.log").read_text()
    assert len(printed.splitlines()) >= 16
    assert set(line.partition(":")[0] for line in printed.splitlines() if line) >= {"easy", "hard"}
    for line in printed.splitlines():
        assert f"printed  {line}" in said["run run.toml --out runs/sums --verbose"]
    assert "reward   1 for the label of sums/0" in said["check run.toml --set plugins.reward=trl_rewards.py:accuracy"]


def test_a_function_that_raises_is_told_by_check_and_once_by_a_run(folder: Path, rollfeed: Rollfeed) -> None:
    (folder / "rewards.py").write_text("def closeness(response, label):\n    print('here')\n    return response[99]\n")
    ran = rollfeed("check", "run.toml")
    assert ran.code == 2
    assert ran.err.startswith("rollfeed: plugins.reward (rewards")
    where = "IndexError: string index out of range (rewards.py:3, in closeness)"
    assert f"{where}: called with row sums/0 and its label as the response; it printed 'here'\n" in ran.err
    ran = rollfeed("run", "run.toml", "--out", "runs/a")
    assert ran.code == 1
    assert ran.err.count("rewards.py:3") == 1
    assert re.search(r"\(and \d+ more like it\)", ran.err)


@pytest.mark.parametrize("parameters", ["response, lable", "completions, lable, **columns"])
def test_a_function_that_asks_for_what_a_row_has_not_is_refused_with_the_row(
    folder: Path, rollfeed: Rollfeed, parameters: str
) -> None:
    (folder / "rewards.py").write_text(f"def closeness({parameters}):\n    return 1\n")
    ran = rollfeed("run", "run.toml", "--out", "runs/a")
    assert ran.code == 2
    assert "sums.csv:2: plugins.reward (rewards" in ran.err
    assert "it asks for 'lable', which this row has not: did you mean label?" in ran.err
    assert not (folder / "runs").exists()


def test_check_in_json_has_what_the_function_said(folder: Path, rollfeed: Rollfeed) -> None:
    (folder / "rewards.py").write_text(
        "def closeness(samples, prompt):\n    return [{'a': 1, 'b': 0.5}] * len(samples)\n"
    )
    keys = ("--set", "plugins.group_reward=rewards.py:closeness", "--set", "reward.reward_key=a")
    (folder / "run.toml").write_text((folder / "run.toml").read_text().partition("[plugins]")[0])
    assert rollfeed("check", "run.toml", *keys, "--json").json["reward"] == {
        "row": "sums/0",
        "response": "4",
        "has_label": True,
        "reward": {"a": 1.0, "b": 0.5},
        "printed": [],
    }
    assert "reward   a 1, b 0.5 for the label of sums/0" in rollfeed("check", "run.toml", *keys).out


@pytest.mark.parametrize("kind", ["async def", "def"])
def test_what_functions_print_in_this_process_is_kept_too(folder: Path, rollfeed: Rollfeed, kind: str) -> None:
    (folder / "rewards.py").write_text(
        f"{kind} closeness(response, label):\n    print('mine', label)\n    return 1.0\n"
    )
    options = ("--set", "reward.functions_in_workers=false", "--set", "rollout.num_rollout=1")
    assert "printed  mine 4\n" in rollfeed("check", "run.toml", *options).out
    ran = rollfeed("run", "run.toml", "--out", "runs/a", "--json", *options)
    assert ran.json["num_steps"] == 1  # nothing else is in the output
    lines = (folder / "runs" / "a" / "rewards.log").read_text().split("\n")
    assert sum("mine" in line for line in lines) >= 8
    assert "mine" not in ran.err


def test_what_is_printed_before_a_worker_is_killed_is_there(
    folder: Path, rollfeed: Rollfeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    program = "import time\ndef closeness(response, label):\n    print('before')\n    time.sleep(60)\n"
    (folder / "rewards.py").write_text(program)
    ran = rollfeed("check", "run.toml", "--set", "reward.timeout_seconds=4")
    assert ran.code == 2
    assert "no result within 4 s" in ran.err
    assert "it printed 'before'" in ran.err


def test_a_run_whose_functions_print_nothing_has_no_log(folder: Path) -> None:
    (folder / "rewards.py").write_text("def closeness(response, label):\n    return 0.0\n")
    command = [sys.executable, "-m", "rollfeed", "run", "run.toml", "--out", "runs/a", "--quiet"]
    subprocess.run(command, check=True, capture_output=True)
    assert not (folder / "runs" / "a" / "rewards.log").exists()


def test_an_evaluation_keeps_what_functions_print(folder: Path, rollfeed: Rollfeed) -> None:
    dataset = '{path="sums.csv", template="{question}=", label_key="answer", metadata_columns=["level"]}'
    options = ("--set", f"eval.datasets=[{dataset}]", "--set", "eval.apply_chat_template=false")
    ran = rollfeed("eval", "run.toml", "--out", "runs/eval", "--json", *options, "--set", "eval.n_samples_per_prompt=1")
    assert ran.code == 0, ran.err
    assert ran.json["sets"]["sums"]["num_prompts"] == 4
    assert (folder / "runs" / "eval" / "rewards.log").read_text().count("and right is") == 4


def test_check_calls_no_function_for_what_a_generate_function_makes(folder: Path, rollfeed: Rollfeed) -> None:
    (folder / "rewards.py").write_text("def closeness(response, metadata):\n    return metadata['turns']\n")
    (folder / "mine.py").write_text("async def answer(request, *, services):\n    raise AssertionError\n")
    ran = rollfeed("check", "run.toml", "--set", "plugins.generate=mine.py:answer")
    assert ran.code == 0, ran.err
