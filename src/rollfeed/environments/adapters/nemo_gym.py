"""Rows of NeMo-Gym, verified by its resources servers: ``POST /verify`` with a row and a response gives a reward.

The response has the form of OpenAI's responses API, with one message of text. Source: ``BaseVerifyRequest`` and
``BaseVerifyResponse`` in the documentation of NeMo-Gym 0.7. Calls are made in workers, and may block.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cache
from http.client import HTTPException
from pathlib import Path
from random import Random
from typing import Any, Self

from rollfeed.environments.adapters.server_parameters import chosen, server_url
from rollfeed.errors import ConfigError, RewardError
from rollfeed.types import Verdict

_DEFAULTS: Mapping[str, Any] = {"url": "", "path": "", "right_at": 1.0}
_SECONDS = 600.0
"""Workers have deadlines of their own."""
_MOST_BYTES = 1 << 26
"""Of a reply, which may repeat the row."""


class NemoGymEnvironment:
    """The rows of a file as problems, and a resources server of NeMo-Gym that verifies responses to them.

    Rows are of one turn: their ``responses_create_params`` have an input in text, or messages of the system, a
    developer and users only, and no tools.

    Args:
        name: For people; the server is chosen by the parameter ``url``.
        parameters: ``url``; ``path`` of a file of rows as JSON lines; ``right_at``, the reward from which on an answer
            counts as right.
    """

    version: int = 1
    max_level: int | None = 0

    def __init__(self, name: str, parameters: Mapping[str, Any] = _DEFAULTS) -> None:
        self.environment_id = f"nemo/{name}"
        self.summary = f"{name}, a resources server of NeMo-Gym"
        self._name = name
        self._parameters = parameters

    def with_parameters(self, parameters: Mapping[str, Any]) -> Self:
        """Return the environment of other parameters. Raises ConfigError if there is no such one."""
        return type(self)(self._name, chosen(self.environment_id, self._parameters, parameters))

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Draw a row."""
        url = server_url(self.environment_id, self._parameters)
        rows = _rows(self._parameters["path"])
        row = json.loads(random.choice(rows))
        question = _question(row["responses_create_params"])
        return question, {"url": url, "row": row, "right_at": self._parameters["right_at"]}, None

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Ask the server. Raises RewardError if it does not give a reward."""
        asked = {**params["row"], "response": _response(response)}
        url = f"{params['url']}/verify"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(asked).encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
                reward = json.loads(reply.read(_MOST_BYTES))["reward"]
        except urllib.error.HTTPError as error:
            raise RewardError(f"{url} answered {error.code}: {error.read(200)!r}") from error
        except (OSError, HTTPException, KeyError, TypeError, ValueError, RecursionError) as error:
            raise RewardError(f"{url} gave no reward: {type(error).__name__}: {error}") from error
        if not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max:
            raise RewardError(f"{url} gave the reward {reward!r:.80}")
        return Verdict.graded(reward >= params["right_at"], reward=reward)


@cache
def _rows(path: str) -> Sequence[str]:
    if not path:
        raise ConfigError("parameters.path is missing: it names a file of rows as JSON lines")
    rows = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows:
        raise ConfigError(f"parameters.path = {path!r}: has no rows")
    return rows


def _question(asked: Mapping[str, Any]) -> str:
    messages = asked["input"]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if asked.get("instructions"):
        messages = [{"role": "system", "content": asked["instructions"]}, *messages]
    if asked.get("tools") or not {each.get("role") for each in messages} <= {"system", "developer", "user"}:
        raise ValueError("the row has tools or turns of an assistant: rows of one turn in text are taken")
    return "\n\n".join(_text(each["content"]) for each in messages)


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _response(text: str) -> dict[str, Any]:
    written = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "msg_0", "type": "message", "role": "assistant", "status": "completed", "content": [written]}
    about = {"id": "resp_0", "object": "response", "created_at": 0.0, "model": "policy", "output": [message]}
    return {**about, "parallel_tool_calls": False, "tool_choice": "none", "tools": []}
