from __future__ import annotations

import asyncio

import pytest

from rollfeed.protocols import ExecLimits
from rollfeed.sandbox import LocalSandboxes

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
