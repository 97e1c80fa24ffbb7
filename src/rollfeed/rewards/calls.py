"""Calls of reward functions that may be plain or async, slow, broken or stuck.

Invariant: whatever the function does, the caller gets on within the deadline, and nothing waits for a
stuck thread when the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from rollfeed.base.importing import is_async
from rollfeed.errors import WorkerCallError, WorkerTimeoutError
from rollfeed.faults import attributed, describe
from rollfeed.types import Outcome, Verdict

_MAX_THREADS = 32


@dataclass(frozen=True, slots=True)
class Returned:
    """The function returned ``value``."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


@dataclass(frozen=True, slots=True)
class OwnPace:
    """An async function that holds its own deadlines and its own number of calls at once; it is awaited without any."""

    function: Callable[..., Awaitable[Any]]
    calls: object = None
    """The user's function that it stands for."""

    async def __call__(self, *args: Any) -> Any:
        return await self.function(*args)


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

    async def call(self, function: Callable[..., Any], *args: Any) -> Returned | Verdict:
        """Call ``function``.

        Returns:
            What it returned, or the TIMEOUT or ERROR verdict when it did not. A plain function that overran its
            deadline cannot be stopped: its thread is left behind and its result ignored.
        """
        if isinstance(function, OwnPace):
            return _told(await _settle(function(*args)))
        if is_async(function):
            async with self._turns:
                return await self._within(_call_on_loop(function, args), self._timeout_seconds)
        started = asyncio.get_running_loop().time()
        async with self._threads:
            waited = asyncio.get_running_loop().time() - started
            outcome = await self._within(_call_in_thread(function, args), self._timeout_seconds)
        if isinstance(outcome, Verdict) or not inspect.isawaitable(outcome.value):
            return outcome
        left = self._timeout_seconds + waited - (asyncio.get_running_loop().time() - started)
        async with self._turns:
            return await self._within(_settle(outcome.value), left)

    async def _within(self, call: Awaitable[Returned | _Raised], seconds: float) -> Returned | Verdict:
        try:
            async with asyncio.timeout(seconds) as deadline:
                return _told(await call)
        except TimeoutError as error:
            if deadline.expired():
                detail = f"no result within {self._timeout_seconds:g} s"
                return Verdict(reward=None, outcome=Outcome.TIMEOUT, detail=detail)
            return failure(error)


def _told(outcome: Returned | _Raised) -> Returned | Verdict:
    return failure(outcome.error) if isinstance(outcome, _Raised) else outcome


async def _call_on_loop(function: Callable[..., Any], args: tuple[Any, ...]) -> Returned | _Raised:
    try:
        awaitable = function(*args)
    except Exception as error:  # reported as the verdict of this call
        return _Raised(error)
    return await _settle(awaitable)


async def _settle(awaitable: Any) -> Returned | _Raised:
    task = asyncio.current_task()
    try:
        return Returned(await awaitable)
    except asyncio.CancelledError as error:
        # Raised by the function itself unless somebody cancelled this task.
        if task is not None and task.cancelling():
            raise
        return _Raised(error)
    except Exception as error:  # reported as the verdict of this call
        return _Raised(error)


async def _call_in_thread(function: Callable[..., Any], args: tuple[Any, ...]) -> Returned | _Raised:
    # Not asyncio.to_thread: its threads are few, so that stuck calls block all others, and the exit waits for them.
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Returned | _Raised] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(outcome: Returned | _Raised) -> None:
        if not future.done():
            future.set_result(outcome)

    def work() -> None:
        outcome: Returned | _Raised
        try:
            outcome = Returned(context.run(function, *args))
        except BaseException as error:  # SystemExit of a reward function must not end the run
            outcome = _Raised(error)
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits for this result any more
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=work, name="rollfeed-reward", daemon=True).start()
    return await future


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
        return Verdict(reward=None, outcome=Outcome.TIMEOUT, detail=message)
    if isinstance(error, WorkerCallError):  # its message names what was raised over there
        return Verdict(reward=None, outcome=Outcome.ERROR, detail=message[:1_000])
    return Verdict(reward=None, outcome=Outcome.ERROR, detail=describe(error))
