"""Work that is waited for: finished although who waits is cancelled, or done all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

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


async def all_at_once(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what all return, in order; the first that raises ends the others, and its error is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in coroutines]
    except* Exception as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
