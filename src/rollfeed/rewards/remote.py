"""The grader ``remote_rm``: a reward server is asked.

Invariants: whatever the server does, a grading ends within its tries, and with a failed verdict unless the server sent
a finite number; one session serves all gradings.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollfeed.config import RemoteForm, RemoteRewardSettings
from rollfeed.config.api_key import REFUSING_STATUSES, ApiKey
from rollfeed.errors import RewardError
from rollfeed.rewards.hub import PROMPT_KEY
from rollfeed.rewards.results import to_verdict

if TYPE_CHECKING:
    import aiohttp
from rollfeed.types import Outcome, Verdict

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


class RemoteGrader:
    """Asks a server for the reward of a response. Entered with ``async with``, which closes its connections.

    Without a url every grading is an ERROR. The key is by default what the environment has of it.

    Raises:
        ConfigError: If the variable that should hold the key does not.
    """

    def __init__(self, settings: RemoteRewardSettings, *, api_key: ApiKey | None = None) -> None:
        self._settings = settings
        self._api_key = api_key or ApiKey.read(settings.api_key_env, setting="reward.remote.api_key_env")
        self._turns = asyncio.Semaphore(settings.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self.num_in_flight = 0
        """Requests that the server is working on."""

    async def __aenter__(self) -> RemoteGrader:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        """Return the server's verdict; ERROR, or TIMEOUT when it did not answer in time, with the cause."""
        url, max_tries = self._settings.url, self._settings.max_tries
        if url is None:
            return Verdict.failed("rm_type remote_rm: no server: set reward.remote.url")
        try:
            body = json.dumps(self._body(response, label, metadata), allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return Verdict.failed(f"the label or the prompt is not JSON: {error}")
        failed = _Failed(Outcome.ERROR, "not asked")
        for attempt in range(max_tries):
            if attempt:
                await asyncio.sleep(_pause(attempt, failed))
            async with self._turns:
                result = await self._try(url, body)
            if isinstance(result, Verdict):
                return result
            failed = result
        tries = f"{max_tries} tries" if max_tries > 1 else "1 try"
        return Verdict.failed(f"{url}: {failed.detail} ({tries})", failed.outcome)

    def _body(self, response: str, label: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
        if self._settings.form is RemoteForm.PREDICTIONS:
            return {"predictions": response, "answers": "" if label is None else str(label)}
        return {"prompt": metadata.get(PROMPT_KEY), "response": response, "label": label}

    async def _try(self, url: str, body: bytes) -> Verdict | _Failed:
        import aiohttp  # here and below, as runs without a remote grader, and checks, do not need it

        self.num_in_flight += 1
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                return await self._ask(url, body)
        except TimeoutError:
            return _Failed(Outcome.TIMEOUT, f"no reply within {self._settings.timeout_seconds:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return _Failed(Outcome.ERROR, str(error) or type(error).__name__)
        finally:
            self.num_in_flight -= 1

    async def _ask(self, url: str, body: bytes) -> Verdict | _Failed:
        session = self._open_session()
        headers = {"Content-Type": "application/json", **self._api_key.headers}
        async with session.post(url, data=body, headers=headers, allow_redirects=False) as reply:
            content = await _read(reply.content)
        if reply.status != 200:
            content = self._api_key.hidden(content)
        if reply.status in REFUSING_STATUSES:
            return Verdict.failed(f"{url}: {self._api_key.refusal(reply.status)}")
        if reply.status in _RETRYABLE or reply.status >= 500:
            wait = reply.headers.get("Retry-After", "")
            seconds = float(wait) if wait.isdecimal() else None
            return _Failed(Outcome.ERROR, f"HTTP {reply.status}: {_shown(content)}", seconds)
        if reply.status != 200:
            return Verdict.failed(f"{url}: HTTP {reply.status}: {_shown(content)}")
        try:
            return self._verdict(json.loads(content))
        except (ValueError, RecursionError):
            return Verdict.failed(f"{url}: the reply is not JSON: {_shown(content)}")
        except RewardError as error:
            return Verdict.failed(f"{url}: {error}")

    def _verdict(self, reply: Any) -> Verdict:
        value, details, key = reply, {}, self._settings.reply_key
        if isinstance(reply, dict) and key in reply:
            value, details = reply[key], reply
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None and details.get("outcome") in (Outcome.TIMEOUT.value, Outcome.ERROR.value):
            cause = str(details.get("detail", ""))[:500]
            return Verdict.failed(f"says the reward server: {cause}", Outcome(details["outcome"]))
        if isinstance(value, dict) and any(map(_is_number, value.values())):
            verdict = to_verdict(value, reward_key=next(name for name, each in value.items() if _is_number(each)))
            if verdict.outcome is Outcome.OK:
                return verdict
        if not _is_number(value):
            raise RewardError(f"the reply has no finite number under {key!r}: {json.dumps(reply):.200}")
        return to_verdict(value, reward_key=None)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._settings.concurrency),
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session


async def _read(content: aiohttp.StreamReader) -> bytes:
    import aiohttp

    received = bytearray()
    async for part in content.iter_any():
        received += part
        if len(received) > _MAX_REPLY_BYTES:
            raise aiohttp.ClientPayloadError(f"the reply is larger than {_MAX_REPLY_BYTES} bytes")
    return bytes(received)


def _pause(attempt: int, failed: _Failed) -> float:
    if failed.wait_seconds is not None:
        return min(failed.wait_seconds, _LONGEST_PAUSE_SECONDS)
    # Only when the next try comes depends on chance, so that many do not come at once.
    return float(min(_FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1), _LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1.0))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300 and math.isfinite(value)


def _shown(content: bytes) -> str:
    return " ".join(content[:200].decode(errors="replace").split()) or "nothing"
