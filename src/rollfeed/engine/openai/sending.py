"""From a call to its answer: tries, what a failure means, and when to give up."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable
from random import Random

from rollfeed.engine.http import Failure, TryFailedError
from rollfeed.engine.openai.calls import Call, Part
from rollfeed.engine.openai.counters import Counters
from rollfeed.engine.openai.probing import Server
from rollfeed.engine.openai.replies import Answer
from rollfeed.engine.openai.requests import Ask, encode_ask
from rollfeed.engine.openai.transport import Transport
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.types import FinishKind, VersionSpan

_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 10.0
_COUNTER_OF = {
    Failure.CONNECTION: "connection_failures",
    Failure.SERVER: "server_errors",
    Failure.REFUSED: "refused_requests",
    Failure.BROKEN: "broken_replies",
    Failure.STALE: "stale_replies",
    Failure.UNASKED_ABORT: "unasked_aborts",
}


class Sender:
    """Sends calls until they are answered; holds them while it is closed."""

    def __init__(
        self, *, transport: Transport, server: Server, counters: Counters, exact: bool, stream: bool, max_tries: int
    ) -> None:
        self.policy_version = server.policy_version
        self.is_suspect = False
        """Whether the server may have been started again, with other weights, since it last told its version."""
        self.restore: Callable[[], Awaitable[None]] | None = None
        """Gives a suspect server its weights back where it has lost them; None where it does not tell."""
        self.broken: str | None = None
        """Why nothing may be sent, as long as that is so."""
        self.running: dict[Call, Answer] = {}
        """What the server works on, and what it has sampled so far."""
        self._transport = transport
        self._server = server
        self._counters = counters
        self._exact = exact
        self._stream = stream
        self._max_tries = max_tries
        self._jitter = Random()
        self._numbers = itertools.count()
        self._suffix = secrets.token_hex(4)
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    def close_gate(self) -> None:
        """Begin no further try."""
        self._open.clear()

    def open_gate(self) -> None:
        """Let what waits go on."""
        self._open.set()

    async def empty(self, *, timeout_seconds: float) -> None:
        """End every try, with the gate closed; the calls go on when it opens.

        Raises:
            EngineUnavailableError: If one does not end in time.
        """
        for call in self.running:
            call.interrupt()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            raise EngineUnavailableError("requests do not end") from None

    async def answer(self, call: Call) -> None:
        """Set ``call.finish``, and ``call.parts`` or ``call.loose``.

        Raises:
            EngineUnavailableError: If every try failed.
            EngineProtocolError: If a try can never succeed.
        """
        while True:
            while not self._open.is_set():
                await self._open.wait()
            if self.broken is not None:
                raise EngineUnavailableError(self.broken)
            try:
                if self.is_suspect and self.restore is not None:
                    await self.restore()
                    continue  # the gate may be closed by now
                await self._try(call)
            except TryFailedError as failure:
                await self._back_off(call, failure)
                continue
            except EngineProtocolError:
                self._counters.rejected_replies += 1
                raise
            if call.finish is not None:
                return

    async def _try(self, call: Call) -> None:
        server, ask = self._server, self._next_ask(call)
        answer = Answer(prompt_ids=ask.prompt_ids, max_new_tokens=call.remaining_tokens)
        body = encode_ask(ask, route=server.route, model=server.model, stream=self._stream)
        version, was_interrupted = self.policy_version, False
        missing: tuple[str, ...] = ()
        self.running[call] = answer
        self._idle.clear()
        try:
            async with call.try_scope():
                await self._receive(body, answer)
            self._end(answer, version)
        except TimeoutError:
            was_interrupted = True
        finally:
            call.end_try()
            self.running.pop(call, None)
            if not self.running:
                self._idle.set()
            missing = self._keep(call, answer, version)
        if missing and self._exact:
            raise EngineProtocolError(f"reply: it has no {' and no '.join(missing)}")
        is_aborted = call.finish is not None and call.finish.kind is FinishKind.ABORT
        if not is_aborted or call.remaining_tokens <= 0:
            return
        # The server ended it, and the caller had not asked for that: the rest is still wanted.
        call.finish = None
        if not was_interrupted and not len(answer.token_ids):
            raise TryFailedError(Failure.UNASKED_ABORT, f"{self._transport.base_url}: aborted by the server")

    async def _receive(self, body: bytes, answer: Answer) -> None:
        try:
            await self._transport.receive(self._server.route.path, body, answer.take)
        except TryFailedError:
            if answer.finish is None:
                raise  # otherwise all of the response is there, and only the end of the stream is not

    def _end(self, answer: Answer, version: int) -> None:
        address = self._transport.base_url
        try:
            answer.end()
        except EngineProtocolError as error:
            raise EngineProtocolError(f"{address}: {error}") from error
        if answer.version_spans and answer.version_spans[-1].policy_version < version:
            message = (
                f"{address}: answered from version {answer.version_spans[-1].policy_version}, {version} is current"
            )
            self.is_suspect = True
            answer.forget()
            raise TryFailedError(Failure.STALE, message)

    def _next_ask(self, call: Call) -> Ask:
        if call.parts:
            self._counters.resumed_requests += 1
        return Ask(
            prompt_ids=call.input_ids,
            params=call.params,
            num_sampled=call.num_sampled,
            request_id=f"{call.request_id}.{self._suffix}{next(self._numbers):08x}",
        )

    def _keep(self, call: Call, answer: Answer, version: int) -> tuple[str, ...]:
        """Add an answer to its call, and return what it lacks for that."""
        call.cached_tokens = call.cached_tokens or answer.cached_tokens
        if answer.finish is None:
            self._counters.closed_requests += 1
            self._counters.closed_tokens += call.remaining_tokens - len(answer.token_ids)
        missing = self._server.missing_of(answer)
        if missing and not self._exact:
            call.loose = answer
        elif not missing and len(answer.token_ids):
            spans = answer.version_spans or (VersionSpan(0, len(answer.token_ids), version),)
            call.parts.append(Part(answer.token_ids, answer.logprobs, spans))
        call.finish = answer.finish
        return missing

    async def _back_off(self, call: Call, failure: TryFailedError) -> None:
        counters, kind = self._counters, failure.failure
        self.is_suspect = self.is_suspect or kind is Failure.CONNECTION
        counter = _COUNTER_OF[kind]
        setattr(counters, counter, getattr(counters, counter) + 1)
        if kind is Failure.REFUSED:
            call.num_refusals += 1
        else:
            call.num_failures += 1
        if call.num_failures >= self._max_tries:
            raise EngineUnavailableError(
                f"no answer after {call.num_failures} failed tries; the last: {failure}"
            ) from failure
        counters.retries += 1
        num_before = (call.num_refusals if kind is Failure.REFUSED else call.num_failures) - 1
        longest = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** min(num_before, 16))
        await asyncio.sleep(max(failure.wait_seconds or 0.0, longest * self._jitter.uniform(0.5, 1.0)))
