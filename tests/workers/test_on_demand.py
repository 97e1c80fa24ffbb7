from __future__ import annotations

import asyncio

import pytest

from rollfeed.errors import ConfigError, WorkerDiedError
from rollfeed.workers import WorkerPool


async def test_processes_start_with_the_first_call_and_end_with_the_block(leaves_no_process: None, processes) -> None:
    before = processes()
    async with WorkerPool(num_workers=2) as pool:
        assert processes() <= before
        totals = await asyncio.gather(*(pool.call("operator.add", [n, 1], deadline_seconds=60.0) for n in range(8)))
        assert totals == list(range(1, 9))
        assert len(processes() - before) == 2
        assert pool.counts.calls == 8


async def test_call_after_the_block_is_refused(leaves_no_process: None) -> None:
    async with WorkerPool(num_workers=1) as pool:
        pass
    with pytest.raises(WorkerDiedError, match="closed"):
        await pool.call("operator.add", [1, 1], deadline_seconds=60.0)


async def test_start_that_fails_is_told_to_each_call(leaves_no_process: None) -> None:
    async with WorkerPool(num_workers=1, warm_up=["no_such_module"]) as pool:
        for _ in range(2):
            with pytest.raises(ConfigError, match="no_such_module"):
                await pool.call("operator.add", [1, 1], deadline_seconds=60.0)


async def test_leaving_while_the_processes_start_leaves_none(leaves_no_process: None) -> None:
    async with WorkerPool(num_workers=2) as pool:
        calling = asyncio.create_task(pool.call("time.sleep", [3600], deadline_seconds=3600.0))
        await asyncio.sleep(0)
    with pytest.raises(WorkerDiedError):
        await calling
