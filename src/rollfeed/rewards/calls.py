"""Calls of reward functions that may be plain or async, slow, broken or stuck.

Invariant: whatever the function does, the caller gets on within the deadline, and nothing waits for a
stuck thread when the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rollfeed.base.importing import is_async
from rollfeed.base.printing import users_printing
from rollfeed.base.waiting import call_in_own_thread
from rollfeed.errors import WorkerCallError, WorkerTimeoutError
from rollfeed.faults import attributed, describe
from rollfeed.types import Outcome, Verdict

_MAX_THREADS = 32


class _RaisedError(Exception):
    """The function raised ``error``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class OwnPace:
    """An async function that holds its own deadlines and its own number of calls at once; it is awaited without any."""

    function: Callable[..., Awaitable[Any]]
    calls: object = None
    """The user's function that it stands for."""

    async def __call__(self, *args: Any) -> Any:
        return await self.function(*args)


@dataclass(frozen=True, slots=True)
class GroupGrader(OwnPace):
    """A grader whose rewards depend on the other answers to a prompt: it waits for all of them."""

    compare: Callable[..., Awaitable[Sequence[Any]]] = field(kw_only=True)
    """Called with the responses, the label and the metadata; gives one result a response, in order."""


@dataclass(frozen=True, slots=True)
class OfSamples(OwnPace):
    """An :class:`OwnPace` that is called with a sample and its prompt, in place of response, label and metadata."""


class Caller:
    """Calls reward functions: plain ones in a thread each, async ones on the event loop.

    Args:
        timeout_seconds: Of each call, from its turn.
        concurrency: Calls at once; by default any number of async ones, and a number of threads that is bounded.
    """

    def __init__(self, *, timeout_seconds: float, concurrency: int | None = None) -> None:
        self._timeout_seconds = timeout_seconds
        self._threads = asyncio.Semaphore(min(_MAX_THREADS, concurrency or _MAX_THREADS))
        self._turns = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function``.

        Returns:
            What it returned, or the TIMEOUT or ERROR verdict when it did not. A plain function that overran its
            deadline cannot be stopped: its thread is left behind and its result ignored.
        """
        try:
            if isinstance(function, OwnPace):
                return await _settle(function, args)
            with users_printing():
                if is_async(function):
                    async with self._turns, asyncio.timeout(self._timeout_seconds):
                        return await _settle(function, args)
                return await self._call_plain(function, args)
        except _RaisedError as raised:
            return failure(raised.error)
        except TimeoutError:
            return Verdict.failed(f"no result within {self._timeout_seconds:g} s", Outcome.TIMEOUT)

    async def _call_plain(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        async with self._threads, asyncio.timeout(self._timeout_seconds) as deadline:
            result = await _call_in_thread(function, args)
        if not inspect.isawaitable(result):
            return result
        left = (deadline.when() or 0.0) - asyncio.get_running_loop().time()
        async with self._turns, asyncio.timeout(left):
            return await _settle(lambda: result, ())


async def _settle(function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> Any:
    """Await what an async function returns; what it raises becomes a _RaisedError."""
    task = asyncio.current_task()
    try:
        return await function(*args)
    except asyncio.CancelledError as error:
        # Raised by the function itself unless somebody cancelled this task.
        if task is not None and task.cancelling():
            raise
        raise _RaisedError(error) from error
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise _RaisedError(error) from error


async def _call_in_thread(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result, raised = await call_in_own_thread(partial(function, *args), name="rollfeed-reward")
    if raised is not None:
        raise _RaisedError(raised)
    return result


def blamed(verdict: Verdict, *, setting: str, function: object) -> Verdict:
    """Return the verdict; one that says that a user's function failed says which, and where it is."""
    if verdict.outcome is Outcome.OK:
        return verdict
    users = function.calls if isinstance(function, OwnPace) else function
    return replace(verdict, detail=attributed(setting, users, verdict.detail))


def failure(error: BaseException) -> Verdict:
    """Return the verdict that says what was raised: TIMEOUT for a worker's timeout, else ERROR."""
    message = " ".join(str(error).split())
    if isinstance(error, WorkerTimeoutError):
        return Verdict.failed(message, Outcome.TIMEOUT)
    if isinstance(error, WorkerCallError):  # its message names what was raised over there
        return Verdict.failed(message[:1_000])
    return Verdict.failed(describe(error))
