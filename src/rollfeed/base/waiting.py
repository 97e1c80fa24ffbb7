"""Work that is finished although who waits for it is cancelled."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def until_done(task: asyncio.Task[T]) -> T:
    """Return what a task returns; a cancellation of who waits is raised when the task has ended, however it has.

    For threads, which cannot be cancelled: what they work on is whole then.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # read, so that asyncio does not complain of one that nobody has
        raise
