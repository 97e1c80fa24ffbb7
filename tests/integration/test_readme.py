"""The commands in README's first steps run, in their order, with a model of a second in place of the real one."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ELSEWHERE = {
    "convert-slime": "its script is the reader's; tests/compat/convert has scripts",
    "train": "minutes; tests/integration/test_train.py trains on these examples",
    "eval": "of the trained model",
}
"""Commands that are not run here, and why."""
HERE = {"runs/sums": "runs/seeds/seed=1", "runs/demo": "runs/words", "RUN": "runs/words", "DIR": "samples"}
NUMBERS = {"39": "1", "4": "1", "313": "0", "313.1": "0.1"}
"""What other pages' commands that look at a run are called with: runs, steps and groups that are here."""
LOOKING = ("show", "replay", "report", "atif export")
SMALL = """
[model]
checkpoint = "tiny"

[engine]
threads = 1
num_slots = 8
context_length = 512
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which has the example that README begins with, made small."""
    example = tmp_path / "examples" / "word_problems"
    shutil.copytree(ROOT / "examples" / "word_problems", example)
    settings = (example / "word_problems.toml").read_text().partition("[[filters")[0]
    settings = settings.replace('label_key = "answer"', 'label_key = "answer"\napply_chat_template = false')
    settings = settings.replace("rollout_max_response_len = 64", "rollout_max_response_len = 8")
    (example / "word_problems.toml").write_text(settings + SMALL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_steps_run(folder: Path, rollfeed: Callable[..., Any]) -> None:
    blocks = re.findall(r"^```\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = [line.partition(" #")[0] for block in blocks for line in block.splitlines() if "bin/rollfeed " in line]
    commands = [shlex.split(line)[1:] for line in lines]
    run = [command for command in commands if command[0] not in ELSEWHERE]
    assert len(run) >= 7
    for command in run:
        ran = rollfeed(*command)
        assert ran.code == 0, (command, ran.err)
    assert {path.name for path in (folder / "runs").iterdir()} == {"words", "seeds"}
    for line in sorted(set(looking_commands())):
        ran = rollfeed(*(HERE.get(word, NUMBERS.get(word, word)) for word in shlex.split(line)))
        assert ran.code == 0, (line, ran.err)


def looking_commands() -> list[str]:
    """Return the commands of other pages that look at a run."""
    text = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("runs.md", "viewing.md", "lint.md"))
    lines = re.findall(r"^rollfeed (.*?)(?: {3,}.*)?$", text, re.MULTILINE)
    found = [re.sub(r" \[--[^\]]*\]", "", line) for line in lines if line.startswith(LOOKING)]
    assert len(found) > 10
    return found


def test_the_commands_in_its_sentences_run(folder: Path, rollfeed: Callable[..., Any]) -> None:
    del folder
    told = re.findall(r"`rollfeed (env [^`]*)`", README)
    assert len(told) == 2
    for command in told:
        assert rollfeed(*shlex.split(command)).code == 0
