"""Ctrl-C, as a terminal sends it to the whole process group: one line, exit code 130, nothing left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EVAL = """
[eval]
[[eval.environments]]
id = "core/copy_text"
level = 2
num_prompts = 3000
"""
BREAKING_IMPORT = """
import sys
from importlib.abc import MetaPathFinder

class Breaking(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "rollfeed.cli.bench":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Breaking())
from rollfeed.cli.main import entry_point
entry_point()
"""


def interrupted(command: list[str], *, when: str, folder: Path, times: int = 1) -> tuple[int, list[str]]:
    """Interrupt a command when it has said ``when``; return its exit code, and what it says from then on."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            said = []
            for line in process.stdout:
                said.append(line)
                if when in line:
                    break
            else:
                pytest.fail(f"{when!r} was not said: {said}")
            for _ in range(times):
                os.killpg(process.pid, signal.SIGINT)
            rest = process.stdout.read().splitlines()
            return process.wait(timeout=60), rest
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(
    ("command", "when", "last"),
    [
        ("run {settings} --out {out}", "step 0: 3 groups", "rollfeed: stopped; rollfeed run --resume {out} goes on"),
        (
            "train {settings} --out {out}",
            "step 0: reward",
            "rollfeed: stopped; rollfeed train {settings} --out {out} goes on",
        ),
        ("eval {settings} --out {out}", " answers, ", "rollfeed: interrupted"),
        ("serve fake-sglang --port 0", "fake SGLang at", None),
        ("serve reward --rm-type math --port 0", "serving rewards at", None),
    ],
)
def test_ctrl_c_leaves_one_line_at_most(
    settings_file: Callable[..., Path],
    tmp_path: Path,
    command: str,
    when: str,
    last: str | None,
) -> None:
    extra = EVAL if command.startswith("eval") else "[train]\nmicro_batch_tokens = 512\n"
    places = {"settings": settings_file(extra, num_rollout=10_000), "out": tmp_path / "out"}
    words = [sys.executable, "-m", "rollfeed", *command.format(**places).split()]
    code, rest = interrupted(words, when=when, folder=tmp_path, times=3 if command.startswith("run") else 1)
    assert code == 130
    if last is None:  # servers end so when they are told to
        assert rest == []
        return
    assert rest[-1] == last.format(**places)
    said = [line for line in rest if line.startswith("rollfeed:") or "Traceback" in line or "Error" in line]
    assert said == [rest[-1]]


def test_ctrl_c_while_commands_are_still_imported_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BREAKING_IMPORT], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "rollfeed: interrupted\n")
