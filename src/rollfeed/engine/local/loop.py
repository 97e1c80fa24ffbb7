"""The thread that does all of a local engine's computing.

The event loop never waits for torch: requests and commands are handed to the thread, which takes
them between two steps and answers through futures. Invariant: every request that was accepted is
answered exactly once, whether it finishes, is aborted, the engine is closed or its thread fails. A command
that fails is told to whoever gave it and ends nothing else; a step that fails ends the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from rollfeed.engine.backends.backend import Backend
from rollfeed.engine.backends.replacement import HalfWrittenError
from rollfeed.engine.backends.requests import Request
from rollfeed.errors import COMPUTING_ERRORS, EngineError, EngineUnavailableError, in_one_line

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 1.0
_THREAD_FAILED = "the engine's thread failed"


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
        self._over: Future[None] = Future()

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
        """Hand over a request. Raises EngineError if the thread has failed or is closing."""
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
            EngineError: If the action fails in any other way, or the thread has failed before.
        """
        reply: Future[None] = Future()
        reply.set_running_or_notify_cancel()

        def run() -> None:
            action()
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

    async def failed(self) -> None:
        """Return when the thread has been closed. Raises EngineError when it fails, or if it has failed."""
        await asyncio.shield(asyncio.wrap_future(self._over))

    def _run(self) -> None:
        try:
            self._backend.start()
        except BaseException as error:
            self._end(closed)
            remedy = "; where memory is short, lower engine.num_slots or engine.context_length"
            is_computing = isinstance(error, COMPUTING_ERRORS)
            self._started.set_exception(_failed("the engine does not start", error, remedy) if is_computing else error)
            return
        self._started.set_result(None)
        try:
            while self._proceed(lambda: self._backend.has_work):
                self._backend.step(self._between_tokens)
        except EngineClosing:
            self._end(closed)
        except BaseException as error:
            # What fails in computing is told by the requests; where rollfeed itself fails, the place matters.
            logger.error(_THREAD_FAILED, exc_info=None if isinstance(error, COMPUTING_ERRORS) else error)
            self._end(partial(_failed, _THREAD_FAILED, error))
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
            except EngineError as error:
                command.fail(error)
            except Exception as error:
                if isinstance(error, HalfWrittenError):
                    command.fail(_failed(_THREAD_FAILED, error))
                    raise
                logger.error("a command of the engine failed", exc_info=error)
                command.fail(_failed("a command of the engine failed", error))

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
        if failure is closed:
            self._over.set_result(None)
        else:
            self._over.set_exception(failure())


def closed() -> EngineError:
    """Return the error of a request to an engine that is not open."""
    return EngineUnavailableError("the engine is closed")


def _failed(what: str, cause: BaseException, remedy: str = "") -> EngineError:
    error = EngineError(f"{what}: {in_one_line(cause)}{remedy}")
    error.__cause__ = cause
    return error
