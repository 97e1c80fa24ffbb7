"""Requests to the servers of a judge.

Invariants: a request ends within the judge's patience, with a body or a :class:`JudgeFailedError`; what a server says
of its limits is kept to by all requests; where several servers are, one that fails is not asked again at once.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rollfeed.config.api_key import ApiKey
from rollfeed.config.judge import JudgeSettings
from rollfeed.rewards.judging.counts import JudgeCounts, JudgeFailure
from rollfeed.rewards.over_http.json_server import JsonServer, RequestFailedError
from rollfeed.routing import AdaptiveLimit, Throughput, Window
from rollfeed.types import Outcome

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
_LONGEST_REST_SECONDS = 3600.0
_MAX_REPLY_BYTES = 16 << 20
_SUSPECT_SECONDS = 5.0
_START_A_SERVER = 256
_MEASURING_SECONDS = 1.0
_MINUTE_SECONDS = 60.0
_TOO_MANY = 429


class JudgeFailedError(Exception):
    """A question has no answer that can be used."""

    def __init__(self, kind: JudgeFailure, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind

    @property
    def outcome(self) -> Outcome:
        """The outcome of a grading that needs it."""
        return Outcome.TIMEOUT if self.kind is JudgeFailure.TIMEOUT else Outcome.ERROR


@dataclass(slots=True)
class _Server:
    url: str
    num_running: int = 0
    free_at: float = 0.0
    """By the event loop's time: not to be asked before."""
    suspect_until: float = 0.0
    """Others are asked before it until then."""
    num_rests: int = 0
    """In a row."""

    def rest(self, seconds: float | None) -> None:
        """Leave it alone; those that fail while it rests have nothing new to say, nor has one that says 0 seconds."""
        now = asyncio.get_running_loop().time()
        if seconds:
            self.free_at = max(self.free_at, now + min(seconds, _LONGEST_REST_SECONDS))
        elif now >= self.free_at:
            self.free_at = now + _pause(self.num_rests)
            self.num_rests += 1


class JudgeClient:
    """Asks the servers of one judge. :meth:`close` ends its connections."""

    def __init__(self, settings: JudgeSettings, *, api_key: ApiKey, counts: JudgeCounts) -> None:
        self._settings, self._counts = settings, counts
        self._http = JsonServer(
            api_key=api_key,
            timeout_seconds=settings.timeout_seconds,
            max_tries=1,
            concurrency=settings.max_concurrency,
            max_reply_bytes=_MAX_REPLY_BYTES,
        )
        self._servers = [_Server(f"{url}/chat/completions") for url in settings.servers]
        self._limit = AdaptiveLimit(
            num_workers=len(self._servers), ceiling=settings.max_concurrency, start_a_worker=_START_A_SERVER
        )
        self._throughput = Throughput()
        self._num_running = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._sent: deque[float] = deque()
        """Times of the requests of the last minute, where they are limited."""

    async def close(self) -> None:
        await self._http.__aexit__()

    async def ask(self, body: dict[str, Any]) -> Any:
        """Return the JSON value that a server replied to a body. Raises JudgeFailedError."""
        settings, last = self._settings, JudgeFailedError(JudgeFailure.TIMEOUT, "no turn")
        content, num_failures = json.dumps(body).encode(), 0
        try:
            async with asyncio.timeout(settings.patience_seconds):
                while True:
                    try:
                        return await self._try(content)
                    except RequestFailedError as error:
                        last = JudgeFailedError(_kind(error), str(error))
                        if not error.may_repeat:
                            raise last from None
                        num_failures += last.kind is not JudgeFailure.RATE_LIMITED
                        if num_failures >= settings.max_tries:
                            break
                        self._counts.num_retries += 1
                        if not _rests(error):
                            await asyncio.sleep(_pause(num_failures - 1))
        except TimeoutError:
            kind = JudgeFailure.TIMEOUT if last.kind is not JudgeFailure.RATE_LIMITED else last.kind
            detail = f"no verdict within patience_seconds = {settings.patience_seconds:g}: {last}"
            raise JudgeFailedError(kind, detail) from None
        raise JudgeFailedError(last.kind, f"{last} ({settings.max_tries} tries)")

    async def _try(self, content: bytes) -> Any:
        async with self._turn() as server:
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                body = await self._http.ask(server.url, content)
            except RequestFailedError as error:
                if error.may_repeat:
                    server.suspect_until = loop.time() + _SUSPECT_SECONDS
                if _rests(error):
                    server.rest(error.wait_seconds)
                if error.status == _TOO_MANY:
                    self._limit.refused()
                raise
            server.num_rests = 0
            self._counts.seconds.append(loop.time() - began)
            self._throughput.note(began=began, ended=loop.time(), num_tokens=1)
            self._learn()
            return body

    def _learn(self) -> None:
        """Set the limit anew, once a second at most, by how many replies a second there are."""
        if self._throughput.seconds_waited < _MEASURING_SECONDS:
            return
        running, before = sum(server.num_running for server in self._servers), self._limit.limit
        if (rate := self._throughput.take(running)) is not None:
            num_requests = self._throughput.num_requests
            self._limit.observe(
                Window(tokens_per_second=rate, num_requests=num_requests, running=running, waiting=0, in_flight=running)
            )
            self._throughput.restart(changed=self._limit.limit != before)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[_Server]:
        """Give the server to ask, when there is one and a request may be sent."""
        loop = asyncio.get_running_loop()
        if self._waiters or self._num_running >= self._limit.limit:
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._leave()
                raise
        else:
            self._num_running += 1
        try:
            await self._keep_pace()
            while True:
                server = self._least_busy(loop.time())
                if server.free_at <= loop.time():
                    break
                await asyncio.sleep(server.free_at - loop.time())
            server.num_running += 1
            try:
                yield server
            finally:
                server.num_running -= 1
        finally:
            self._leave()

    def _least_busy(self, now: float) -> _Server:
        return min(self._servers, key=lambda each: (max(each.free_at, now), now < each.suspect_until, each.num_running))

    def _leave(self) -> None:
        self._num_running -= 1
        while self._waiters and self._num_running < self._limit.limit:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._num_running += 1
                waiter.set_result(None)

    async def _keep_pace(self) -> None:
        """Wait until another request fits into the last minute."""
        most, loop = self._settings.requests_per_minute, asyncio.get_running_loop()
        while most is not None:
            while self._sent and self._sent[0] <= loop.time() - _MINUTE_SECONDS:
                self._sent.popleft()
            if len(self._sent) < most:
                self._sent.append(loop.time())
                return
            await asyncio.sleep(self._sent[0] + _MINUTE_SECONDS - loop.time())


def _kind(error: RequestFailedError) -> JudgeFailure:
    if error.status is None:
        return JudgeFailure.TIMEOUT if error.outcome is Outcome.TIMEOUT else JudgeFailure.CONNECTION
    by_status = {200: JudgeFailure.UNREADABLE, _TOO_MANY: JudgeFailure.RATE_LIMITED}
    return by_status.get(error.status, JudgeFailure.HTTP)


def _rests(error: RequestFailedError) -> bool:
    """Whether the whole server is to be left alone for a time."""
    is_asked = error.status == _TOO_MANY or (error.may_repeat and error.wait_seconds is not None)
    return is_asked or _kind(error) is JudgeFailure.CONNECTION


def _pause(num_before: int) -> float:
    # Only when the next try comes depends on chance, so that many do not come at once.
    longest = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(num_before, 16), _LONGEST_PAUSE_SECONDS)
    return float(longest * random.uniform(0.5, 1.0))
