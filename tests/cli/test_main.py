from __future__ import annotations

import os
import subprocess
import sys

import pytest

import rollfeed
from rollfeed.cli.main import build_parser, main

LOADED = """
import sys
from rollfeed.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
heavy = {"aiohttp", "numpy", "pyarrow", "pydantic", "rich", "rollfeed.app", "rollfeed.config", "tokenizers", "torch"}
print("loaded:", *sorted(heavy & sys.modules.keys()), file=sys.stderr)
"""


def loaded_by(*arguments: str) -> list[str]:
    """Return which of the large modules a command imports, in a process of its own."""
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LOADED, *arguments]
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=True)
    return done.stderr.splitlines()[-1].split()[1:]


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("no-command",), ()])
def test_help_and_version_import_no_large_module(arguments: tuple[str, ...]) -> None:
    assert loaded_by(*arguments) == []


@pytest.mark.parametrize("arguments", [("--print",), ("--set", "num_rollout=3")])
def test_settings_are_checked_and_printed_without_engine_and_model(
    arguments: tuple[str, ...], tmp_path: os.PathLike[str]
) -> None:
    path = os.path.join(tmp_path, "run.toml")
    with open(path, "w", encoding="utf-8") as file:
        file.write('[[prompts.environments]]\nid = "core/copy_text"\n')
    loaded = loaded_by("check", path, *arguments)
    assert "rollfeed.config" in loaded
    assert {"rollfeed.app", "torch", "tokenizers", "aiohttp", "pyarrow"}.isdisjoint(loaded)


def test_every_command_of_the_list_has_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    main_help = build_parser("").format_help()
    for command in build_parser("")._subparsers._group_actions[0].choices:  # type: ignore[union-attr]
        assert command in main_help
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert len(capsys.readouterr().out.splitlines()) > 4


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"rollfeed {rollfeed.__version__}\n")
