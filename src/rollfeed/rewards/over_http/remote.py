"""The grader ``remote_rm``: a reward server is asked.

Invariants: whatever the server does, a grading ends within its tries, and with a failed verdict unless the server sent
a finite number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollfeed.config import RemoteForm, RemoteRewardSettings
from rollfeed.config.api_key import ApiKey
from rollfeed.errors import RewardError
from rollfeed.rewards.hub import PROMPT_KEY
from rollfeed.rewards.over_http.json_server import JsonServer, is_finite_number
from rollfeed.rewards.results import to_verdict
from rollfeed.types import Outcome, Verdict


class RemoteGrader:
    """Asks a server for the reward of a response. Entered with ``async with``, which closes its connections.

    Without a url every grading is an ERROR. The key is by default what the environment has of it.

    Raises:
        ConfigError: If the variable that should hold the key does not.
    """

    def __init__(self, settings: RemoteRewardSettings, *, api_key: ApiKey | None = None) -> None:
        self._settings = settings
        self._server = JsonServer(
            api_key=api_key or ApiKey.read(settings.api_key_env, setting="reward.remote.api_key_env"),
            timeout_seconds=settings.timeout_seconds,
            max_tries=settings.max_tries,
            concurrency=settings.concurrency,
        )

    async def __aenter__(self) -> RemoteGrader:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.__aexit__(*exc_info)

    async def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        """Return the server's verdict; ERROR, or TIMEOUT when it did not answer in time, with the cause."""
        url = self._settings.url
        if url is None:
            return Verdict.failed("rm_type remote_rm: no server: set reward.remote.url")
        reply = await self._server.post(url, self._body(response, label, metadata))
        if isinstance(reply, Verdict):
            return reply
        try:
            return self._verdict(reply.value)
        except RewardError as error:
            return Verdict.failed(f"{url}: {error}")

    def _body(self, response: str, label: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
        if self._settings.form is RemoteForm.PREDICTIONS:
            return {"predictions": response, "answers": "" if label is None else str(label)}
        return {"prompt": metadata.get(PROMPT_KEY), "response": response, "label": label}

    def _verdict(self, reply: Any) -> Verdict:
        value, details, key = reply, {}, self._settings.reply_key
        if isinstance(reply, dict) and key in reply:
            value, details = reply[key], reply
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None and details.get("outcome") in (Outcome.TIMEOUT.value, Outcome.ERROR.value):
            cause = str(details.get("detail", ""))[:500]
            return Verdict.failed(f"says the reward server: {cause}", Outcome(details["outcome"]))
        if isinstance(value, dict) and any(map(is_finite_number, value.values())):
            verdict = to_verdict(value, reward_key=next(name for name, each in value.items() if is_finite_number(each)))
            if verdict.outcome is Outcome.OK:
                return verdict
        if not is_finite_number(value):
            raise RewardError(f"the reply has no finite number under {key!r}: {json.dumps(reply):.200}")
        return to_verdict(value, reward_key=None)
