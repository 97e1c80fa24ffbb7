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


class RequestFailedError(Exception):
    """A request that no JSON value came back for.

    Args:
        detail: For people, with the address.
        status: Of the reply; None where none has come.
        outcome: Of a grading that needs it.
        may_repeat: Whether the same request may succeed later.
        wait_seconds: Until when the server asks to be left alone.
    """

    def __init__(
        self,
        detail: str,
        *,
        status: int | None = None,
        outcome: Outcome = Outcome.ERROR,
        may_repeat: bool = False,
        wait_seconds: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.outcome = status, outcome
        self.may_repeat, self.wait_seconds = may_repeat, wait_seconds


@dataclass(frozen=True, slots=True)
class JsonReply:
    """The JSON value that a server answered with."""

    value: Any
    url: str
    """Where it came from."""


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
        failed = RequestFailedError("not asked")
        for attempt in range(self._max_tries):
            if attempt:
                await asyncio.sleep(_pause(attempt, failed.wait_seconds))
            async with self._turns:
                try:
                    return JsonReply(await self.ask(urls[attempt % len(urls)], content), urls[attempt % len(urls)])
                except RequestFailedError as error:
                    failed = error
            if not failed.may_repeat:
                return Verdict.failed(str(failed), failed.outcome)
        tries = f"{self._max_tries} tries" if self._max_tries > 1 else "1 try"
        return Verdict.failed(f"{failed} ({tries})", failed.outcome)

    async def ask(self, url: str, content: bytes) -> Any:
        """Return the JSON value that one request is answered with. Raises RequestFailedError."""
        import aiohttp  # here and below, as runs without a reward server, and checks, do not need it

        self.num_in_flight += 1
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._answer(url, content)
        except TimeoutError:
            detail = f"{url}: no reply within timeout_seconds = {self._timeout_seconds:g}"
            raise RequestFailedError(detail, outcome=Outcome.TIMEOUT, may_repeat=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailedError(f"{url}: {str(error) or type(error).__name__}", may_repeat=True) from None
        finally:
            self.num_in_flight -= 1

    async def _answer(self, url: str, content: bytes) -> Any:
        headers = {"Content-Type": "application/json", **self._api_key.headers}
        async with self._open_session().post(url, data=content, headers=headers, allow_redirects=False) as reply:
            body = await _received(reply.content, most_bytes=self._max_reply_bytes)
        status = reply.status
        if status == 200:
            try:
                return json.loads(body)
            except (ValueError, RecursionError):
                told = _shown(self._api_key.hidden(body))
                raise RequestFailedError(f"{url}: the reply is not JSON: {told}", status=status) from None
        if status in REFUSING_STATUSES:
            raise RequestFailedError(f"{url}: {self._api_key.refusal(status)}", status=status)
        raise RequestFailedError(
            f"{url}: HTTP {status}: {_shown(self._api_key.hidden(body))}",
            status=status,
            may_repeat=status in _RETRYABLE or status >= 500,
            wait_seconds=retry_after(reply.headers.get("Retry-After")),
        )

    def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:  # without proxies, cookies and deadlines of its own
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._concurrency),
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session


async def _received(content: aiohttp.StreamReader, *, most_bytes: int) -> bytes:
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
        except (ValueError, OverflowError):
            return None


def _pause(attempt: int, wait_seconds: float | None) -> float:
    if wait_seconds:  # 0 would be to ask again and again
        return min(wait_seconds, _LONGEST_PAUSE_SECONDS)
    # Only when the next try comes depends on chance, so that many do not come at once.
    return float(min(_FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1), _LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1.0))


def is_finite_number(value: Any) -> bool:
    """Whether a JSON value is a finite number of a size that sums can hold."""
    return isinstance(value, int | float) and abs(value) < 1e300


def _shown(content: bytes) -> str:
    """Return the beginning of a body for people."""
    return " ".join(content[:200].decode(errors="replace").split()) or "nothing"
