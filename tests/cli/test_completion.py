"""Shells complete commands, actions, options and keys of settings by what ``rollfeed completion`` prints."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from rollfeed.cli.main import build_parser, main

PROGRAMS = {
    "bash": 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _rollfeed; echo "${COMPREPLY[@]}"',
    # Outside of a completion zsh filters nothing by what is there of the word.
    "zsh": "autoload -U compinit; compinit -D -u; source $0; emulate -L ksh; "
    'COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _rollfeed; echo "${COMPREPLY[@]}"',
    "fish": 'source $argv[1]; complete -C "$argv[2..]"',
}
CASES = [
    (["rollfeed", "sho"], ["show"]),
    ([".venv/bin/rollfeed", "sho"], ["show"]),
    ([".venv/bin/rollfeed", "run", "--out", "bin/rollfeed", "sho"], []),
    (["rollfeed", "serve", "fak"], ["fake-sglang"]),
    (["rollfeed", "serve", "engine", "--por"], ["--port"]),
    (["rollfeed", "env", "check", "--al"], ["--all"]),
    (["rollfeed", "check", "run.toml", "--pri"], ["--print"]),
    (["rollfeed", "run", "run.toml", "--set", "rollout.num_r"], ["rollout.num_rollout="]),
    (["rollfeed", "completion", "fi"], ["fish"]),
    (["rollfeed", "run", "--resume", "nowhere"], []),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for shell in PROGRAMS:
        with (folder / shell).open("w") as file, redirect_stdout(file):
            assert main(["completion", shell]) == 0
    return folder


@pytest.mark.parametrize("shell", PROGRAMS)
def test_words_are_completed(shell: str, scripts: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    options = {"fish": ["--no-config", "-c"], "zsh": ["-f", "-c"]}.get(shell, ["-c"])
    for words, expected in CASES:
        given = [" ".join(words)] if shell == "fish" else words
        ran = subprocess.run(
            [shell, *options, PROGRAMS[shell], str(scripts / shell), *given], capture_output=True, text=True, check=True
        )
        assert ran.stderr == ""
        found = [line.partition("\t")[0] for line in ran.stdout.splitlines()] if shell == "fish" else ran.stdout.split()
        if shell == "zsh":
            found = [word for word in found if word.startswith(words[-1])]
        assert found == expected, words


@pytest.mark.parametrize("shell", PROGRAMS)
def test_every_command_is_in_the_script(shell: str, scripts: Path) -> None:
    script = (scripts / shell).read_text()
    (commands,) = (action.choices for action in build_parser("")._actions if action.dest == "==SUPPRESS==")
    assert commands
    for command in commands:
        assert f"rollfeed {command}" in script
