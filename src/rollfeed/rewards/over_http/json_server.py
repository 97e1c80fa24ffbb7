"""Requests of JSON to a server that scores: tries, pauses, keys and bounded replies.

Invariants: whatever the server does, a call ends within its tries; one session serves all calls.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from rollfeed.config.api_key import REFUSING_STATUSES, ApiKey
from rollfeed.types import Outcome, Verdict

if TYPE_CHECKING:
    import aiohttp

_MAX_REPLY_BYTES = 1024**2
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
_RETRYABLE = (408, 429)


@dataclass(frozen=True, slots=True)
class _Failed:
    """A try that may succeed when repeated."""

    outcome: Outcome
    detail: str
    wait_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class JsonReply:
    """The JSON value that a server answered with."""

    value: Any


class JsonServer:
    """Posts JSON and reads JSON. Entered with ``async with``, which closes its connections.

    Args:
        api_key: Of the server.
        timeout_seconds: For one try.
        max_tries: When connections fail, time runs out, or the status is 408, 429 or 5xx; anything else fails at once.
        concurrency: Requests at once; more wait.
        max_reply_bytes: A reply that is larger fails.
    """

    def __init__(
        self,
        *,
        api_key: ApiKey,
        timeout_seconds: float,
        max_tries: int,
        concurrency: int,
        max_reply_bytes: int = _MAX_REPLY_BYTES,
    ) -> None:
        self._api_key = api_key
        self._timeout_seconds = timeout_seconds
        self._max_tries = max_tries
        self._concurrency = concurrency
        self._max_reply_bytes = max_reply_bytes
        self._turns = asyncio.Semaphore(concurrency)
        self._session: aiohttp.ClientSession | None = None
        self.num_in_flight = 0
        """Requests that the server is working on."""

    async def __aenter__(self) -> JsonServer:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def post(self, url: str | Sequence[str], body: Any) -> JsonReply | Verdict:
        """Return the reply to a JSON value; a failed verdict, with the cause, where there is none.

        Of several addresses each try takes the next one.
        """
        urls = [url] if isinstance(url, str) else url
        try:
            content = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return Verdict.failed(f"the label or the prompt is not JSON: {error}")
        failed = _Failed(Outcome.ERROR, "not asked")
        for attempt in range(self._max_tries):
            if attempt:
                await asyncio.sleep(_pause(attempt, failed))
            async with self._turns:
                result = await self._try(urls[attempt % len(urls)], content)
            if not isinstance(result, _Failed):
                return result
            failed = result
        tries = f"{self._max_tries} tries" if self._max_tries > 1 else "1 try"
        last = urls[(self._max_tries - 1) % len(urls)]
        return Verdict.failed(f"{last}: {failed.detail} ({tries})", failed.outcome)

    async def _try(self, url: str, body: bytes) -> JsonReply | Verdict | _Failed:
        import aiohttp  # here and below, as runs without a reward server, and checks, do not need it

        self.num_in_flight += 1
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._ask(url, body)
        except TimeoutError:
            return _Failed(Outcome.TIMEOUT, f"no reply within {self._timeout_seconds:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return _Failed(Outcome.ERROR, str(error) or type(error).__name__)
        finally:
            self.num_in_flight -= 1

    async def _ask(self, url: str, body: bytes) -> JsonReply | Verdict | _Failed:
        session = self._open_session()
        headers = {"Content-Type": "application/json", **self._api_key.headers}
        async with session.post(url, data=body, headers=headers, allow_redirects=False) as reply:
            content = await received(reply.content, most_bytes=self._max_reply_bytes)
        if reply.status != 200:
            content = self._api_key.hidden(content)
        if reply.status in REFUSING_STATUSES:
            return Verdict.failed(f"{url}: {self._api_key.refusal(reply.status)}")
        if reply.status in _RETRYABLE or reply.status >= 500:
            seconds = retry_after(reply.headers.get("Retry-After"))
            return _Failed(Outcome.ERROR, f"HTTP {reply.status}: {shown(content)}", seconds)
        if reply.status != 200:
            return Verdict.failed(f"{url}: HTTP {reply.status}: {shown(content)}")
        try:
            return JsonReply(json.loads(content))
        except (ValueError, RecursionError):
            return Verdict.failed(f"{url}: the reply is not JSON: {shown(content)}")

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = opened_session(num_connections=self._concurrency)
        return self._session


def opened_session(*, num_connections: int) -> aiohttp.ClientSession:
    """Return connections to servers that score, any number where that is 0: without proxies, cookies and deadlines."""
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=num_connections),
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    )


async def received(content: aiohttp.StreamReader, *, most_bytes: int) -> bytes:
    """Return a body. Raises ClientPayloadError if it is too large."""
    import aiohttp

    body = bytearray()
    async for part in content.iter_any():
        body += part
        if len(body) > most_bytes:
            raise aiohttp.ClientPayloadError(f"the reply is larger than {most_bytes} bytes")
    return bytes(body)


def retry_after(header: str | None) -> float | None:
    """Return the seconds that a Retry-After says, which may be a date; None where it says none."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        try:
            return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
        except ValueError:
            return None


def _pause(attempt: int, failed: _Failed) -> float:
    if failed.wait_seconds:  # 0 would be to ask again and again
        return min(failed.wait_seconds, _LONGEST_PAUSE_SECONDS)
    # Only when the next try comes depends on chance, so that many do not come at once.
    return float(min(_FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1), _LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1.0))


def is_finite_number(value: Any) -> bool:
    """Whether a JSON value is a finite number of a size that sums can hold."""
    return isinstance(value, int | float) and abs(value) < 1e300


def shown(content: bytes) -> str:
    """Return the beginning of a body for people."""
    return " ".join(content[:200].decode(errors="replace").split()) or "nothing"
