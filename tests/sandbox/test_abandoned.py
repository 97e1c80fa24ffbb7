"""What a process that was killed leaves of its sandboxes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import rollfeed
from rollfeed.protocols import Isolation, IsolationLevel
from rollfeed.sandbox import LocalSandboxes

ISOLATION = Isolation(level=IsolationLevel.LIMITS, network_cut=False, files_hidden=False, detail="")
HOLDING = """
import asyncio, pathlib, sys
from rollfeed.protocols import Isolation, IsolationLevel
from rollfeed.sandbox import LocalSandboxes

async def main():
    level = Isolation(level=IsolationLevel.LIMITS, network_cut=False, files_hidden=False, detail="")
    async with LocalSandboxes(isolation=level, max_running=1, scratch=pathlib.Path(sys.argv[1])).open() as sandbox:
        await sandbox.write("file", b"content")
        print(sandbox._folder.parent, flush=True)
        sys.stdin.read()

asyncio.run(main())
"""


def holding(scratch: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that has a sandbox; return it with the sandbox's folder."""
    environment = {**os.environ, "PYTHONPATH": str(Path(rollfeed.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(scratch)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_x45_folders_of_a_killed_process_go_at_the_next_start_and_no_others(tmp_path: Path) -> None:
    living, kept = holding(tmp_path)
    killed, left = holding(tmp_path)
    foreign = tmp_path / "rollfeed-sandbox-of-others"
    foreign.mkdir()
    try:
        killed.kill()
        killed.wait()
        assert (left / "box" / "file").exists()

        async def open_one() -> set[Path]:
            async with LocalSandboxes(isolation=ISOLATION, max_running=1, scratch=tmp_path).open():
                return set(await asyncio.to_thread(lambda: list(tmp_path.iterdir())))

        found = asyncio.run(open_one())
        assert {kept, foreign} < found
        assert left not in found
        assert len(found) == 3
        assert (kept / "box" / "file").exists()
    finally:
        for process in (living, killed):
            process.kill()
            process.communicate()


async def test_a_folder_that_another_start_takes_for_one_left_behind_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = [], tempfile.mkdtemp

    def taken_at_once(*args: Any, **named: Any) -> str:
        made.append(make(*args, **named))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", taken_at_once)
    async with LocalSandboxes(isolation=ISOLATION, max_running=1, scratch=tmp_path).open() as sandbox:
        await sandbox.write("file", b"content")
        assert await sandbox.read("file") == b"content"
    assert len(made) == 2
    assert os.listdir(tmp_path) == []
