"""Reward models on servers: SGLang, vLLM, and those that answer as text-embeddings-inference does.

SGLang's ``/classify`` answers with the head's outputs as an embedding; vLLM's ``/classify`` with ``probs``, logits when
it is asked to leave its activation out, and ``/pooling`` with those of every token; ``/predict`` of
text-embeddings-inference takes text alone and names labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from rollfeed.config.api_key import ApiKey
from rollfeed.config.reward_model import RewardModelSettings, RewardServerKind, ScoredUnit
from rollfeed.errors import RewardError
from rollfeed.rewards.models.inputs import ScoredText
from rollfeed.rewards.models.local_model import Logits
from rollfeed.rewards.over_http.json_server import JsonServer, is_finite_number
from rollfeed.types import Verdict

_MAX_REPLY_BYTES = 64 * 1024**2
"""Scores of every token are many numbers."""


class ServedRewardModel:
    """Asks servers in turns. Entered with ``async with``, which closes its connections.

    Raises:
        ConfigError: If the variable that should hold the key does not.
    """

    def __init__(self, settings: RewardModelSettings, *, labels: Sequence[str]) -> None:
        self._settings = settings
        self._labels = tuple(labels)
        self._addresses = cycle(range(len(settings.servers)))
        self._server = JsonServer(
            api_key=ApiKey.read(settings.api_key_env, setting="reward.model.api_key_env"),
            timeout_seconds=settings.timeout_seconds,
            max_tries=settings.max_tries,
            concurrency=settings.concurrency,
            max_reply_bytes=_MAX_REPLY_BYTES,
        )

    async def __aenter__(self) -> ServedRewardModel:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.__aexit__(*exc_info)

    async def logits(self, text: ScoredText) -> Logits | Verdict:
        """Return the logits of a text at its places, or the failed verdict that says why there are none."""
        first = next(self._addresses)
        servers = (*self._settings.servers[first:], *self._settings.servers[:first])
        path, body = self._request(text)
        reply = await self._server.post([server + path for server in servers], body)
        if isinstance(reply, Verdict):
            return reply
        try:
            rows = self._read(reply.value, text)
            if len(rows) != len(text.places) or any(len(row) != len(self._labels) for row in rows):
                raise RewardError(f"it has no score of {len(self._labels)} labels at {len(text.places)} places")
        except (RewardError, LookupError, TypeError, AttributeError) as error:
            about = str(error) if isinstance(error, RewardError) else "it has another form"
            return Verdict.failed(f"{reply.url}: the reply is no score: {about}: {reply.value!r:.200}")
        return rows

    def _request(self, text: ScoredText) -> tuple[str, dict[str, Any]]:
        ids, kind = list(text.token_ids), self._settings.kind
        if kind is RewardServerKind.SGLANG:
            return "/classify", {"input_ids": ids}
        if kind is RewardServerKind.TEI:
            return "/predict", {"inputs": text.text, "raw_scores": True, "truncate": False}
        body: dict[str, Any] = {"input": [ids], "use_activation": False}
        if self._settings.served_name is not None:
            body["model"] = self._settings.served_name
        if self._settings.unit is ScoredUnit.RESPONSE:
            return "/classify", body
        return "/pooling", {**body, "task": "token_classify"}

    def _read(self, reply: Any, text: ScoredText) -> Logits:
        match self._settings.kind:
            case RewardServerKind.SGLANG:
                rows = [reply["embedding"]]
            case RewardServerKind.TEI:
                scores = {str(each["label"]): each["score"] for each in reply}
                rows = [[scores[label] for label in self._labels] if len(self._labels) > 1 else list(scores.values())]
            case _ if self._settings.unit is ScoredUnit.RESPONSE:
                rows = [reply["data"][0]["probs"]]
            case _:
                every = reply["data"][0]["data"]
                if len(every) != len(text.token_ids):
                    raise RewardError(f"it has scores of {len(every)} tokens, and {len(text.token_ids)} were sent")
                rows = [every[place] for place in text.places]
        if not all(is_finite_number(value) for row in rows for value in row):
            raise RewardError("a score is no finite number")
        return [[float(value) for value in row] for row in rows]
