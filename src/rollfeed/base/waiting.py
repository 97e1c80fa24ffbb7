"""Work that is waited for: finished although who waits is cancelled, done all at once, left to a thread, or told of."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")

_LEAST_TOLD_SECONDS = 1.0


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


@asynccontextmanager
async def telling_of_waiting(
    tell: Callable[[str], None], *, most_seconds: float, limit_seconds: float, limit: str
) -> AsyncIterator[None]:
    """Tell while the block waits: after a quarter of its limit, then each time that it has waited twice as long.

    Args:
        tell: Called with how long it has waited, of what.
        most_seconds: Until it tells first, where a quarter of the limit is longer.
        limit_seconds: How long the block waits at most.
        limit: The setting that says so.
    """

    async def keep_telling() -> None:
        waited = seconds = max(_LEAST_TOLD_SECONDS, min(most_seconds, limit_seconds / 4))
        while True:
            await asyncio.sleep(seconds)
            tell(f"{waited:.0f} s of {limit} = {limit_seconds:g}")
            seconds, waited = waited, 2 * waited

    telling = asyncio.create_task(keep_telling())
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
