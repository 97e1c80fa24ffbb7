"""The thread that does all of a local engine's computing.

The event loop never waits for torch: requests and commands are handed to the thread, which takes
them between two steps and answers through futures. Invariant: every request that was accepted is
answered exactly once, whether it finishes, is aborted, the engine is closed or its thread fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from rollfeed.engine.local.requests import Request
from rollfeed.errors import COMPUTING_ERRORS, EngineError, EngineProtocolError, EngineUnavailableError, in_one_line

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 1.0


class Backend(Protocol):
    """What computes. Its methods are called on the engine's thread only; its numbers are read from others."""

    policy_version: int
    vocab_size: int
    num_slots: int
    """Most requests worked on at once."""
    precision: str
    """What it computes in, for example ``fp32``."""

    @property
    def threads(self) -> int:
        """CPU threads it computes with; known after :meth:`start`."""

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""

    @property
    def num_running(self) -> int:
        """Requests being worked on, without those that wait."""

    def start(self) -> None:
        """Load the weights.

        Raises:
            CheckpointError: If they do not fit the model.
        """

    def close(self) -> None:
        """Free what :meth:`start` took; the last call, and only after a start that succeeded."""

    def add(self, request: Request) -> None:
        """Take a request; it waits, first come first served, until there is room."""

    def step(self, between_tokens: Callable[[], None]) -> None:
        """Sample the next token of everything that runs, and answer what has finished.

        A step of more than one token calls ``between_tokens`` between them: commands are carried
        out there, and :class:`EngineClosing` is raised there to end the step.
        """

    def abort(self, chosen: Callable[[Request], bool]) -> None:
        """Answer the chosen requests with what they have."""

    def fail_all(self, failure: Callable[[], EngineError]) -> None:
        """Answer all requests with an error, a new one each."""

    def update_weights(self, tensors: Mapping[str, Any], policy_version: int, *, skip_unknown: bool = False) -> None:
        """Replace weights, all of the named ones or none.

        Args:
            tensors: By the checkpoint's names.
            policy_version: The version of the tokens sampled from now on.
            skip_unknown: Pass over tensors that the model does not have, with a warning, if all of its own are there.

        Raises:
            EngineProtocolError: If they do not fit.
        """

    def take_step_milliseconds(self) -> Mapping[str, float]:
        """Return the mean time of a step since the last call: its parts, as far as they are known, and ``whole``."""

    def retract(self) -> None:
        """Put what runs back to the front of those that wait, with its tokens but without its keys and values."""

    def weight(self, name: str) -> Any | None:
        """Return the tensor of a checkpoint's name, which updates write to; None if there is none."""


class EngineClosing(Exception):  # noqa: N818 - a signal, not an error
    """Ends a step of several tokens because the engine is being closed."""


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[], None]
    fail: Callable[[EngineError], None]
    """Answers whoever waits for it when it cannot be run."""


class EngineThread:
    """Runs a backend's steps, and commands between them; sleeps when there is nothing to do."""

    def __init__(self, backend: Backend, *, name: str) -> None:
        self._backend = backend
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._wake = threading.Condition()
        # Guarded by _wake. Commands are added by any thread and taken by the engine's.
        self._commands: deque[_Command] = deque()
        self._closing = False
        self._failure: Callable[[], EngineError] | None = None
        self.is_paused = False
        """Whether it holds between two steps; set by the engine's thread only."""
        self._started: Future[None] = Future()

    async def start(self) -> None:
        """Start the thread and return when the weights are loaded.

        Raises:
            CheckpointError: If they do not fit the model; the thread has ended then.
            EngineError: If there is not enough memory, or the device fails.
        """
        self._started.set_running_or_notify_cancel()
        self._thread.start()
        try:
            await asyncio.wrap_future(self._started)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the thread after the present step and wait for that, a second at most; what is pending fails.

        On a machine that is busy otherwise a step may take longer; the thread then ends by itself.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.shield(asyncio.to_thread(self._thread.join, _CLOSE_SECONDS))

    def submit(self, request: Request) -> None:
        """Hand over a request.

        Raises:
            EngineError: If the thread has failed or is closing.
        """
        self._post(_Command(lambda: self._backend.add(request), request.fail))

    def drop(self, request: Request) -> None:
        """Abort a request whose caller is gone; does not wait."""
        command = _Command(lambda: self._backend.abort(lambda other: other is request), lambda _: None)
        with contextlib.suppress(EngineError):
            self._post(command)

    async def call(self, action: Callable[[], None]) -> None:
        """Carry out an action between two steps and wait for it.

        Raises:
            EngineProtocolError: If the action does; nothing else has happened then.
            EngineError: If the thread has failed, now or before.
        """
        reply: Future[None] = Future()
        reply.set_running_or_notify_cancel()

        def run() -> None:
            try:
                action()
            except EngineProtocolError as error:
                reply.set_exception(error)
            else:
                reply.set_result(None)

        self._post(_Command(run, reply.set_exception))
        await asyncio.wrap_future(reply)

    async def set_paused(self, paused: bool, *, first: Callable[[], None] | None = None) -> None:
        """Hold between two steps, or go on; ``first`` is carried out at the same point."""

        def action() -> None:
            if first is not None:
                first()
            self.is_paused = paused

        await self.call(action)

    def check(self) -> None:
        """Raise the reason if the thread has ended or is ending."""
        with self._wake:
            if self._failure is not None:
                raise self._failure()
            if self._closing:
                raise closed()

    def _post(self, command: _Command) -> None:
        with self._wake:
            self.check()
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._backend.start()
        except BaseException as error:
            self._end(closed)
            self._started.set_exception(_not_started(error) if isinstance(error, COMPUTING_ERRORS) else error)
            return
        self._started.set_result(None)
        try:
            while self._proceed(lambda: self._backend.has_work):
                self._backend.step(self._between_tokens)
        except EngineClosing:
            self._end(closed)
        except BaseException as error:
            # What fails in computing is told by the requests; where rollfeed itself fails, the place matters.
            logger.error("the engine's thread failed", exc_info=None if isinstance(error, COMPUTING_ERRORS) else error)
            self._end(_Failure(error))
        else:
            self._end(closed)
        self._backend.close()

    def _proceed(self, ready: Callable[[], bool]) -> bool:
        """Carry out commands until there is a step to do; False when the engine is closing."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._commands or (not self.is_paused and ready()))
                if self._closing:
                    return False
                command = self._commands.popleft() if self._commands else None
            if command is None:
                return True
            try:
                command.run()
            except BaseException as error:
                command.fail(_Failure(error)())
                raise

    def _between_tokens(self) -> None:
        if not self._proceed(lambda: True):
            raise EngineClosing

    def _end(self, failure: Callable[[], EngineError]) -> None:
        with self._wake:
            self._failure = failure
            left = list(self._commands)
            self._commands.clear()
        for command in left:
            command.fail(failure())
        self._backend.fail_all(failure)


def closed() -> EngineError:
    """Return the error of a request to an engine that is not open."""
    return EngineUnavailableError("the engine is closed")


def _not_started(cause: BaseException) -> EngineError:
    error = EngineError(
        f"the engine does not start: {in_one_line(cause)}; where memory is short, lower engine.num_slots or "
        "engine.context_length"
    )
    error.__cause__ = cause
    return error


class _Failure:
    """Makes the errors that a failed engine answers with, each with the cause."""

    def __init__(self, cause: BaseException) -> None:
        self._cause = cause

    def __call__(self) -> EngineError:
        error = EngineError(f"the engine's thread failed: {in_one_line(self._cause)}")
        error.__cause__ = self._cause
        return error
