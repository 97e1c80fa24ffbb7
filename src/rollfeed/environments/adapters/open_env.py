"""Episodes in servers of OpenEnv, over its websocket: a client that needs nothing of the package.

Messages are JSON: ``{"type": "reset" | "step", "data": ...}``, each answered with an ``observation`` or an ``error``; a
connection is a session. Source: ``openenv.core.env_server`` of openenv 0.10.0.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Self

import aiohttp

from rollfeed.environments.adapters.server_parameters import chosen, server_url
from rollfeed.errors import RewardError
from rollfeed.protocols import EnvironmentStep
from rollfeed.types import Verdict

_DEFAULTS: Mapping[str, Any] = {
    "url": "",
    "question": "",
    "action_key": "message",
    "observation_key": "",
    "max_turns": 10,
    "right_at": 1.0,
}
_CLOSE_SECONDS = 2.0
_WAIT_SECONDS = 0.2
_MAX_MESSAGE_BYTES = 16 * 1024**2
_LARGEST_REWARD = 1e100
"""Of a turn, so that sums of them are finite."""


class _RefusedError(RewardError):
    """The server answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the server answered {code}: {message}")
        self.code = code


@dataclass(slots=True)
class _Session:
    """A connection, on which one episode goes on."""

    client: aiohttp.ClientSession
    socket: aiohttp.ClientWebSocketResponse
    rewards: list[float] = field(default_factory=list)
    num_turns: int = 0

    @classmethod
    async def open(cls, url: str) -> _Session:
        client = aiohttp.ClientSession()
        try:
            timeout = aiohttp.ClientWSTimeout(ws_close=_CLOSE_SECONDS)
            socket = await client.ws_connect(f"{url}/ws", timeout=timeout, max_msg_size=_MAX_MESSAGE_BYTES)
        except BaseException:
            await client.close()
            raise
        return cls(client, socket)

    async def ask(self, kind: str, **asked: Any) -> Mapping[str, Any]:
        """Return an observation, with its ``done`` and ``reward``."""
        await self.socket.send_json({"type": kind, "data": asked})
        message = await self.socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise RewardError("the server closed the connection")
        try:
            answer = json.loads(message.data)
        except (ValueError, RecursionError) as error:
            raise RewardError(f"the server sent what is not JSON: {error}") from None
        if answer["type"] != "observation":
            about = answer.get("data", {})
            raise _RefusedError(str(about.get("code")), str(about.get("message"))[:200])
        observed: Mapping[str, Any] = answer["data"]
        return observed

    async def close(self) -> None:
        await self.socket.close()
        await self.client.close()


class OpenEnvEnvironment:
    """Episodes of an OpenEnv server: each turn of the policy is an action, and the observation is what it is told.

    An episode is worth the sum of its rewards, also where it has to end early. The server is asked to reset with a
    seed; whether the same seed is the same episode is the server's affair.

    Args:
        name: For people; the server is chosen by the parameter ``url``.
        parameters: ``url``; ``question``, put before the first observation; ``action_key``, the field of the action
            that takes the response, or ``""`` where the response is the action as a JSON object; ``observation_key``,
            the field that the policy is shown, by default all; ``max_turns``; ``right_at``, the sum of rewards from
            which on an episode counts as right.
    """

    version: int = 1
    max_level: int | None = 0

    def __init__(self, name: str, parameters: Mapping[str, Any] = _DEFAULTS) -> None:
        self.environment_id = f"openenv/{name}"
        self.summary = f"{name}, a server of OpenEnv"
        self._name = name
        self._parameters = parameters

    def with_parameters(self, parameters: Mapping[str, Any]) -> Self:
        """Return the environment of other parameters. Raises ConfigError if there is no such one."""
        return type(self)(self._name, chosen(self.environment_id, self._parameters, parameters))

    def for_split(self, split: str) -> Self:
        """Return the environment itself: seeds of different splits differ, and nothing else is known of problems."""
        return self

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Reset the server with a seed, and ask what it shows."""
        url = server_url(self.environment_id, self._parameters)
        params = {**self._parameters, "url": url, "seed": random.getrandbits(31)}

        async def first() -> str:
            session, observed = await self._opened(params)
            await session.close()
            return _shown(observed, params)

        question = asyncio.run(first())
        return "\n\n".join(filter(None, (params["question"], question))), params, None

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Return what an episode is worth that ends with this turn; for checks."""

        async def play() -> Verdict:
            state = await self.start(params)
            try:
                step = await self.step(state, response)
                return step.verdict or await self.give_up(state)
            finally:
                await self.close(state)

        return asyncio.run(play())

    async def start(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin the episode of a problem."""
        session, _ = await self._opened(params)
        return {**params, "session": session}

    async def step(self, state: Mapping[str, Any], response: str) -> EnvironmentStep:
        """Take an action."""
        session: _Session = state["session"]
        session.num_turns += 1
        try:
            observed = await session.ask("step", **_action(state["action_key"], response))
        except (_RefusedError, ValueError, RecursionError) as error:
            if isinstance(error, _RefusedError) and error.code != "VALIDATION_ERROR":
                raise
            shown = f"That is no action: {error}"
        else:
            session.rewards.append(_reward(observed))
            if observed["done"]:
                return EnvironmentStep(verdict=await self.give_up(state))
            shown = _shown(observed, state)
        if session.num_turns >= state["max_turns"]:
            return EnvironmentStep(verdict=await self.give_up(state))
        return EnvironmentStep(state=state, messages=({"role": "user", "content": shown},))

    async def give_up(self, state: Mapping[str, Any]) -> Verdict:
        """Return the rewards so far."""
        session: _Session = state["session"]
        total = sum(session.rewards)
        return Verdict.graded(total >= state["right_at"], reward=total, format_ok=bool(session.rewards))

    async def close(self, state: Mapping[str, Any]) -> None:
        """Close the connection, which ends the session."""
        await state["session"].close()

    async def _opened(self, params: Mapping[str, Any]) -> tuple[_Session, Mapping[str, Any]]:
        """Return a session that has been reset; wait for one where all are taken, as long as the caller lets it."""
        while True:
            session = await _Session.open(params["url"])
            try:
                return session, await session.ask("reset", seed=params["seed"])
            except _RefusedError as error:
                await session.close()
                if error.code != "CAPACITY_REACHED":
                    raise
            except BaseException:
                await session.close()
                raise
            await asyncio.sleep(_WAIT_SECONDS)


def _action(key: str, response: str) -> dict[str, Any]:
    if key:
        return {key: response}
    action = json.loads(response)
    if not isinstance(action, dict):
        raise ValueError("it has to be a JSON object")
    return action


def _shown(observed: Mapping[str, Any], params: Mapping[str, Any]) -> str:
    found = {name: value for name, value in observed["observation"].items() if name != "metadata"}
    if key := params["observation_key"]:
        found = {key: found[key]}
    texts = list(found.values())
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) and texts[0] else json.dumps(found)


def _reward(observed: Mapping[str, Any]) -> float:
    reward = observed["reward"] or 0.0
    if not isinstance(reward, int | float) or not abs(reward) <= _LARGEST_REWARD:
        raise RewardError(f"the server gave the reward {reward!r:.80}")
    return float(reward)
