"""What an evaluation shows while it goes on, and how it is stopped."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollfeed.app import EvalProgress

_LINE_SECONDS = 5.0
_LIVE_SECONDS = 0.2

T = TypeVar("T")


class EvalReporter:
    """A line on standard error that is kept current on a terminal, and repeated every few seconds elsewhere.

    A context manager: leaving it leaves the line.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._is_terminal = sys.stderr.isatty()
        self._last = time.monotonic()
        self._is_open = False

    def __call__(self, progress: EvalProgress) -> None:
        is_last = progress.num_answered == progress.num_answers
        interval = _LIVE_SECONDS if self._is_terminal else _LINE_SECONDS
        if self._quiet or (time.monotonic() - self._last < interval and not (is_last and self._is_terminal)):
            return
        self._last = time.monotonic()
        line = line_of(progress)
        print(f"\r{line:78}" if self._is_terminal else line, end="" if self._is_terminal else "\n", file=sys.stderr)
        sys.stderr.flush()
        self._is_open = self._is_terminal

    def __enter__(self) -> EvalReporter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_open:
            print(file=sys.stderr)


def line_of(progress: EvalProgress) -> str:
    """Return how far an evaluation is, on one line."""
    speed = progress.num_answered / max(progress.seconds, 1e-9)
    right = f"{progress.num_right / progress.num_scored:.1%} right so far" if progress.num_scored else "none scored yet"
    failed = f", {progress.num_failed} prompts failed" if progress.num_failed else ""
    return f"{progress.num_answered} of {progress.num_answers} answers, {right}{failed}, {speed:.1f} answers/s"


async def until_signal(measuring: Coroutine[Any, Any, T]) -> T:
    """Await the evaluation; SIGINT and SIGTERM cancel it, and what it started ends with it.

    Raises:
        KeyboardInterrupt: If it was cancelled so.
    """
    task = asyncio.ensure_future(measuring)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def share_with_interval(share: float | None, low: float, high: float) -> str:
    """Return an accuracy and its interval as people read them."""
    return "-" if share is None else f"{share:.1%} ({low:.1%} to {high:.1%})"
