"""What requests belong to goes with the task that makes them."""

from __future__ import annotations

import asyncio

from rollfeed.routing import Affinity, belonging, current_affinity


async def test_tasks_know_what_the_block_that_started_them_said() -> None:
    async def ask() -> Affinity:
        await asyncio.sleep(0)
        return current_affinity()

    with belonging(group="g", session="s"):
        task = asyncio.create_task(ask())
        with belonging(session="t"):
            inner = asyncio.create_task(ask())
        assert current_affinity() == ("g", "s")
    assert await ask() == (None, None)
    assert (await task, await inner) == (("g", "s"), (None, "t"))
