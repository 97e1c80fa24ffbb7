"""Ends of the process: exit codes for scripts, and a line for people."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from rollfeed.logs import progress

DONE = 0
FAILED = 1
USAGE = 2
"""Wrong usage or input; nothing was started."""
INTERRUPTED = 130
"""By Ctrl-C, as shells say it."""

T = TypeVar("T")


async def until_signal(work: Coroutine[Any, Any, T], *, said: str = "") -> T:
    """Await what a command does; the first SIGINT, SIGTERM or SIGHUP cancels it, and what it started ends with it.

    Signals after the first change nothing: the work is ending, and from then on they are ignored, so that none breaks
    into what the process does last.

    Args:
        work: What is done.
        said: The one line for people that it was stopped so.

    Raises:
        KeyboardInterrupt: With that line, if it was cancelled.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    is_stopped = False

    def stop(number: signal.Signals) -> None:
        nonlocal is_stopped
        is_stopped = True
        if not task.cancelling():
            progress.info("told to stop by %s", number.name)
            task.cancel()

    numbers = _ending_signals()
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt(said) from None
    finally:
        for number in numbers:
            with suppress(KeyboardInterrupt):  # between the two of them
                loop.remove_signal_handler(number)
            if is_stopped:
                signal.signal(number, signal.SIG_IGN)


@contextmanager
def signals_given_back() -> Iterator[None]:
    """Have signals do what they did before, behind a block that :func:`until_signal` may leave ignoring them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _ending_signals() -> list[signal.Signals]:
    """Return what ends a command: a terminal that closes, too, unless it was started with ``nohup``."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


class ToldToEnd:
    """SIGTERM, SIGINT and SIGHUP of a server, noted from when this is made; it needs a running event loop."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self._first: signal.Signals | None = None
        for number in _ending_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._note, number)

    @property
    def exit_code(self) -> int:
        """With which a server ends that was told so: Ctrl-C counts as interrupted."""
        return code_after(self._first)

    async def beside(self, failing: Coroutine[Any, Any, None]) -> None:
        """Return when the server is told to end; raise what ends it before."""
        tasks = [asyncio.ensure_future(self.event.wait()), asyncio.ensure_future(failing)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[1].done():
                await tasks[1]
        finally:
            for task in tasks:
                task.cancel()

    def _note(self, number: signal.Signals) -> None:
        self._first = self._first or number
        self.event.set()


def code_after(received: signal.Signals | None) -> int:
    """Return the exit code of a server that was told to end by this signal."""
    return INTERRUPTED if received is signal.SIGINT else DONE
