"""Templates of ``rollfeed init`` run as they are, and are written where nothing is replaced."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.linting import findings_in

from rollfeed.cli import init

TEMPLATES = sorted(path.name for path in (Path(init.__file__).parent / "templates").iterdir())
Rollfeed = Callable[..., Any]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a fake server whose tokens the model ``tiny`` has."""
    command = [sys.executable, "-m", "rollfeed", "serve", "fake-sglang", "--vocab-size", "40", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate()


def commands(said: str) -> list[list[str]]:
    """Return the commands that ``init`` names, without what it says of them."""
    lines = said.partition("next:\n")[2].splitlines()
    return [line.strip().partition("  ")[0].split() for line in lines]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_runs_as_it_is(
    template: str, rollfeed: Rollfeed, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rollfeed("init", template)
    assert made.code == 0, made.err
    overrides = []
    if template == "servers":
        overrides = ["--set", f'engine.sglang.workers=["{request.getfixturevalue("server")}"]']
    (_, folder), *named = commands(made.out)
    monkeypatch.chdir(folder)
    others = [subprocess.Popen([sys.executable, *words]) for program, *words in named if program == "python"]
    for other in others:
        request.addfinalizer(other.kill)
    for program, *words in named:
        if program == "rollfeed" and words[0] != "serve":
            if words[0] == "train" and template != "dataset":  # one training is enough
                words[0] = "check"
            changed = ["--set", "rollout.num_rollout=2", *overrides] if words[0] in ("run", "train") else []
            ran = rollfeed(*words, *changed)
            assert ran.code == 0, (words, ran.err)
    assert [other.wait(timeout=300) for other in others] == [0] * len(others)
    (run,) = {path.parent for path in Path("runs").glob("*/journal.sqlite") if path.parent.name != "trained"}
    assert findings_in(run) == []


@pytest.mark.soak
def test_the_training_of_the_first_template_learns_what_it_says(
    rollfeed: Rollfeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, folder), *named = commands(rollfeed("init", "dataset").out)
    monkeypatch.chdir(folder)
    (train,) = (words for program, *words in named if words[0] == "train")
    assert rollfeed(*train).code == 0
    lines = (Path("runs") / "trained" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["rollout/reward_mean"] > 0.7


def test_a_sentence_with_the_right_number_is_right_in_the_template_of_servers(rollfeed: Rollfeed) -> None:
    assert rollfeed("init", "servers").code == 0
    rm_type = tomllib.loads(Path("servers/run.toml").read_text())["reward"]["rm_type"]
    Path("said.csv").write_text('response,label\n"12 * 12 is 144.",144\n')
    assert "100.0% correct" in rollfeed("score", "said.csv", "--rm-type", rm_type, "--out", "scored.jsonl").out


def test_the_list_has_a_line_for_each_template(rollfeed: Rollfeed) -> None:
    listed = rollfeed("init", "--list").out.splitlines()
    assert [line.split()[0] for line in listed] == TEMPLATES
    assert all(line.endswith(".") and len(line) <= 120 for line in listed)


def test_a_folder_is_made_by_its_name_and_may_hold_other_files(rollfeed: Rollfeed, folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / "notes.md").write_text("mine")
    assert "\n  cd" not in rollfeed("init", "dataset", ".").out
    assert (folder / "run.toml").exists()
    assert "\n  cd 'my sums/a'\n" in rollfeed("init", "dataset", "my sums/a").out
    assert {path.name for path in (folder / "my sums" / "a").iterdir()} == {"run.toml", "rewards.py", "sums.csv"}


def test_no_file_is_replaced(rollfeed: Rollfeed, folder: Path) -> None:
    (folder / "dataset").mkdir()
    (folder / "dataset" / "rewards.py").write_text("mine")
    ran = rollfeed("init", "dataset")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err == "rollfeed: dataset: has rewards.py already, which is not replaced; choose another folder\n"
    assert [path.name for path in (folder / "dataset").iterdir()] == ["rewards.py"]


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_one_line(rollfeed: Rollfeed, folder: Path, where: str) -> None:
    (folder / "file").write_text("")
    ran = rollfeed("init", "dataset", where)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith(f"rollfeed: {where}: cannot be written (")


def test_an_unknown_template_is_answered_with_those_there_are(rollfeed: Rollfeed) -> None:
    ran = rollfeed("init", "datset")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "no template 'datset': did you mean dataset?; there are agent, dataset" in ran.err


def test_without_torch_it_says_how_to_get_it(rollfeed: Rollfeed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "find_spec", lambda _name: None)
    assert "pip install 'rollfeed[local]'" in rollfeed("init", "dataset").out
    assert "pip install" not in rollfeed("init", "servers").out


def test_the_program_of_the_package_page_runs_on_the_first_template(
    rollfeed: Rollfeed, capfd: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "package.md").read_text(encoding="utf-8")
    assert rollfeed("init", "dataset").code == 0
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(program, "package.md", "exec"), {})
    steps = [line.split()[:2] for line in capfd.readouterr().out.splitlines()]
    assert steps == [["0", "128"], ["1", "128"]]
