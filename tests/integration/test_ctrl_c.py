"""Ctrl-C, as a terminal sends it to the whole process group: one line, exit code 130, nothing left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

EVAL = """
[eval]
[[eval.environments]]
id = "core/copy_text"
level = 2
num_prompts = 3000
n_samples_per_prompt = 64
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


@pytest.mark.parametrize(
    ("command", "when", "last"),
    [
        ("run {settings} --out {out}", "step 0: 3 groups", "rollfeed: stopped; rollfeed run --resume {out} goes on"),
        (
            "train {settings} --out {out} --set seed=2",
            "step 0: reward",
            "rollfeed: stopped; rollfeed train {settings} --set seed=2 --out {out} goes on",
        ),
        ("eval {settings} --out {out}", " answers, ", "rollfeed: interrupted"),
        ("serve fake-sglang --port 0", "fake SGLang at", None),
        ("serve reward --rm-type math --port 0", "serving rewards at", None),
    ],
)
def test_ctrl_c_leaves_one_line_at_most(
    settings_file: Callable[..., Path],
    start_rollfeed: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    when: str,
    last: str | None,
) -> None:
    extra = EVAL if command.startswith("eval") else "[train]\nmicro_batch_tokens = 512\n"
    places = {"settings": settings_file(extra, num_rollout=10_000), "out": tmp_path / "out"}
    monkeypatch.chdir(tmp_path)
    process = start_rollfeed(*command.format(**places).split())
    said = []
    while not said or when not in said[-1]:
        said.append(process.stdout.readline())
        assert said[-1], said
    for _ in range(3 if command.startswith("run") else 1):
        with suppress(ProcessLookupError):  # it has ended before the last of them
            os.killpg(process.pid, signal.SIGINT)
    rest = process.read().splitlines()
    assert process.wait() == 130
    if last is None:  # servers end so when they are told to
        assert rest == []
        return
    assert rest[-1] == last.format(**places)
    if not command.startswith("eval"):
        assert " INFO rollfeed.progress: stopped\n" in (tmp_path / "out" / "run.log").read_text()
    told = [line for line in rest if line.startswith("rollfeed:") or "Traceback" in line or "Error" in line]
    assert told == [rest[-1]]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_after_the_one_that_stopped_a_command_break_into_nothing(first: signal.Signals) -> None:
    program = (
        "import asyncio, os, signal\n"
        "from rollfeed.cli import exit_codes\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whoever started the tests may ignore them
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "async def work():\n"
        f"    os.kill(os.getpid(), {first.value})\n"
        "    await asyncio.Event().wait()\n"
        "with exit_codes.signals_given_back():\n"
        "    try:\n"
        "        asyncio.run(exit_codes.until_signal(work(), said='stopped'))\n"
        "    except KeyboardInterrupt as stop:\n"
        "        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
        "            os.kill(os.getpid(), number)\n"
        "        print(stop)\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\nTrue\n", "")


def test_ctrl_c_while_commands_are_still_imported_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BREAKING_IMPORT, "bench", "engine"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "rollfeed: interrupted\n")


def test_x44_a_terminal_that_closes_ends_a_run_quietly_and_the_log_says_so(
    settings_file: Callable[..., Path], start_rollfeed: Callable[..., Any], tmp_path: Path
) -> None:
    process = start_rollfeed("run", settings_file(num_rollout=10_000), "--out", tmp_path / "out")
    while "step 0: 3 groups" not in (line := process.stdout.readline()):
        assert line
    os.kill(process.pid, signal.SIGHUP)
    rest = process.read().splitlines()
    assert process.wait() == 130
    assert rest[-1] == f"rollfeed: stopped; rollfeed run --resume {tmp_path / 'out'} goes on"
    log = (tmp_path / "out" / "run.log").read_text()
    assert " INFO rollfeed.progress: told to stop by SIGHUP\n" in log
    assert " INFO rollfeed.progress: stopped\n" in log


def test_x44_a_run_that_is_to_outlive_its_terminal_does() -> None:
    program = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from rollfeed.cli import exit_codes\n"
        "import asyncio\n"
        "async def work():\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    await asyncio.sleep(0)\n"
        "    return 7\n"
        "sys.exit(asyncio.run(exit_codes.until_signal(work())))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 7


def test_x44_a_run_whose_output_nobody_takes_is_made_whole(settings_file: Callable[..., Path], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rollfeed", "run", settings_file(num_rollout=2), "--out", tmp_path / "out"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert " INFO rollfeed.progress: finished\n" in (tmp_path / "out" / "run.log").read_text()
