"""Work that is waited for: finished in spite of a cancellation, done all at once, in time, in a thread, or told of."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

_LEAST_TOLD_SECONDS = 1.0
_LONG_SECONDS = 30.0
"""From which on a block may be given up to a second more."""


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


async def in_own_thread(function: Callable[[], T], *, name: str) -> T:
    """Return what a function returns that may block for long, or raise what it raises: :func:`call_in_own_thread`."""
    result, raised = await call_in_own_thread(function, name=name)
    if raised is not None:
        raise raised
    return result  # type: ignore[return-value]


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


class Deadlines:
    """Ends blocks that take too long, with one timer for all that are due in the same second.

    A timer each is three objects and a place in the loop's queue, for every one of thousands. Belongs to one loop.
    """

    def __init__(self) -> None:
        self._due: dict[int, tuple[asyncio.TimerHandle, set[asyncio.Timeout]]] = {}
        """By second of the loop's time; none is empty."""

    def within(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """Return a block that raises TimeoutError after so long, as one of ``asyncio.timeout`` does."""
        return asyncio.timeout(seconds) if seconds < _LONG_SECONDS else _Block(self, seconds)

    def add(self, block: asyncio.Timeout, seconds: float) -> int:
        """Have a block that has been entered end after so long; return what :meth:`remove` wants to know."""
        loop = asyncio.get_running_loop()
        second = math.ceil(loop.time() + seconds)
        if second not in self._due:
            self._due[second] = loop.call_at(second, self._expire, second), set()
        self._due[second][1].add(block)
        return second

    def remove(self, block: asyncio.Timeout, second: int) -> None:
        """Forget a block that is left."""
        if second not in self._due:
            return
        timer, blocks = self._due[second]
        blocks.discard(block)
        if not blocks:
            timer.cancel()
            del self._due[second]

    def _expire(self, second: int) -> None:
        now = asyncio.get_running_loop().time()
        for block in self._due.pop(second)[1]:
            block.reschedule(now)


class _Block(AbstractAsyncContextManager[None]):
    __slots__ = ("_deadlines", "_second", "_seconds", "_timeout")

    def __init__(self, deadlines: Deadlines, seconds: float) -> None:
        self._deadlines, self._seconds = deadlines, seconds

    async def __aenter__(self) -> None:
        self._timeout = asyncio.timeout(None)
        await self._timeout.__aenter__()
        self._second = self._deadlines.add(self._timeout, self._seconds)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadlines.remove(self._timeout, self._second)
        await self._timeout.__aexit__(kind, error, trace)
