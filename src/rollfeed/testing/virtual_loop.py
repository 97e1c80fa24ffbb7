"""An event loop whose time jumps to the next timer when nothing is under way."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_THREAD_SECONDS = 0.05
"""For which a thread's end is waited for at a time."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs servers and clients on loopback within itself, as if computing took no time.

    What was sent over loopback is there at once, so that nothing is under way when no socket is ready. While a thread
    works for it, it waits as any other.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._num_threads = 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        self._num_threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_ended)
        return future

    async def shutdown_default_executor(self, *arguments: Any) -> None:
        self._num_threads += 1  # it waits in a thread of its own
        try:
            await super().shutdown_default_executor(*arguments)
        finally:
            self._num_threads -= 1

    @property
    def has_threads(self) -> bool:
        """Whether a thread works for it."""
        return self._num_threads > 0

    def pass_time(self, seconds: float | None) -> float | None:
        """Let time pass up to the next timer; return for how long sockets and threads are to be waited for."""
        if self._num_threads or seconds is None:
            return _THREAD_SECONDS if seconds is None or seconds > _THREAD_SECONDS else seconds
        self._now += seconds
        return 0.0

    def _thread_ended(self, _future: asyncio.Future[Any]) -> None:
        self._num_threads -= 1


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if ready or timeout == 0:
            return ready
        return super().select(self._loop.pass_time(timeout))


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a loop of its own, as :func:`asyncio.run` does."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def in_virtual_time(main: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Return the function that runs a coroutine function in virtual time, for a test whose timeouts are to be exact."""

    @functools.wraps(main)
    def run(*arguments: P.args, **named: P.kwargs) -> T:
        return run_in_virtual_time(main(*arguments, **named))

    return run
