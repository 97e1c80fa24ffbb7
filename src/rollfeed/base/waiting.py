"""Work that is waited for: finished although who waits is cancelled, done all at once, or left to a thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
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


def without_waiting(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that never waits for anything. Raises RuntimeError if it does."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    coroutine.close()
    raise RuntimeError(f"{coroutine!r:.80} waits: await it")


async def call_in_own_thread(function: Callable[[], T], *, name: str) -> tuple[T | None, BaseException | None]:
    """Call a function in a thread that ends with the process, and return its result, or else what it raised.

    Not ``asyncio.to_thread``: its threads are few, so that stuck calls block all others, and the exit waits for them.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: T | None, raised: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((result, raised))

    def work() -> None:
        result, raised = None, None
        try:
            result = context.run(function)
        except BaseException as error:  # a user's SystemExit must not end the run
            raised = error
        with suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, raised)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await outcome
