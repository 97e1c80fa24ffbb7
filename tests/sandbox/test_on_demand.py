from __future__ import annotations

import asyncio
import logging

import pytest

from rollfeed.errors import ConfigError, SandboxError
from rollfeed.protocols import ExecLimits, Isolation, IsolationLevel
from rollfeed.sandbox import OnDemandSandboxes


async def test_isolation_is_found_out_once_and_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Isolation] = []
    sandboxes = OnDemandSandboxes(on_isolation=told.append)
    with pytest.raises(SandboxError, match="not known"):
        _ = sandboxes.isolation

    async def run() -> bytes:
        async with sandboxes.open() as sandbox:
            return (await sandbox.exec(["python3", "-c", "print(1)"], limits=ExecLimits())).stdout

    with caplog.at_level(logging.INFO, logger="rollfeed"):
        assert await asyncio.gather(run(), run()) == [b"1\n", b"1\n"]
    assert told == [sandboxes.isolation]
    assert [record.getMessage() for record in caplog.records] == [str(sandboxes.isolation)]


async def test_level_that_does_not_hold_is_refused_for_every_sandbox() -> None:
    sandboxes = OnDemandSandboxes(level=IsolationLevel.CONTAINER)
    with pytest.raises(ConfigError, match="container"):
        await sandboxes.start()
    for _ in range(2):
        with pytest.raises(SandboxError, match="container"):
            async with sandboxes.open():
                pass
