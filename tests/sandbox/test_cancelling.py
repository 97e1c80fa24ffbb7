from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from rollfeed.protocols import ExecLimits, Isolation, IsolationLevel
from rollfeed.sandbox import LocalSandboxes
from rollfeed.sandbox.cgroups import Cgroup, Cgroups

ENDLESS = ["python3", "-I", "-S", "-c", "while True: pass"]


@pytest.mark.parametrize("milliseconds", [0, 5, 10, 20, 40])
@pytest.mark.parametrize("cycles", range(1, 9))
async def test_program_cancelled_at_any_moment_of_its_start_leaves_nothing(
    leaves_no_process: None, sandboxes: LocalSandboxes, cycles: int, milliseconds: int
) -> None:
    async with sandboxes.open() as sandbox:
        running = asyncio.create_task(sandbox.exec(ENDLESS, limits=ExecLimits()))
        for _ in range(cycles):
            await asyncio.sleep(milliseconds / 1000 / cycles)  # moments, not a wait for something
        running.cancel()
        async with asyncio.timeout(60):
            with pytest.raises(asyncio.CancelledError):
                await running


class SlowGroups(Cgroups):
    """Makes a group, which is a folder here, when it is told to."""

    asked, told = threading.Event(), threading.Event()

    def make(self, memory_bytes: int) -> Cgroup:
        self.asked.set()
        self.told.wait()
        folder = self.parents[0] / "group"
        folder.mkdir()
        return Cgroup((folder,), is_v2=True)


async def test_program_cancelled_while_its_group_is_made_leaves_no_group(tmp_path: Path) -> None:
    isolation = Isolation(level=IsolationLevel.LIMITS, network_cut=False, files_hidden=False, detail="")
    for name in ("groups", "scratch"):
        (tmp_path / name).mkdir()
    groups = SlowGroups((tmp_path / "groups",), is_v2=True)
    sandboxes = LocalSandboxes(isolation=isolation, max_running=1, scratch=tmp_path / "scratch", cgroups=groups)
    async with sandboxes.open() as sandbox:
        running = asyncio.create_task(sandbox.exec(ENDLESS, limits=ExecLimits()))
        await asyncio.to_thread(groups.asked.wait)
        running.cancel()
        groups.told.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert list((tmp_path / "groups").iterdir()) == []
