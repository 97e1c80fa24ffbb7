"""The generate function for environments that answer back, and for prompts with tools."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.conversations import Conversation, FollowUp
from rollfeed.conversations.picture_places import Placing, needed
from rollfeed.errors import PluginError, RewardError, WorkerCallError, WorkerError
from rollfeed.faults import describe
from rollfeed.generate.calling import NUM_CALLS, NUM_FAILED_CALLS, Calling, may_call
from rollfeed.generate.episode import Episode
from rollfeed.protocols import (
    ENDED_BY,
    MULTI_TURN,
    EnvironmentStep,
    MultiTurnEnvironment,
    RolloutRequest,
    ServedEnvironment,
    Services,
)
from rollfeed.types import FinishKind, Message, Picture, Sample, SampleStatus, Verdict

NUM_TURNS = "num_turns"
"""Key of a sample's metadata: turns of the policy."""


async def multi_turn(
    request: RolloutRequest,
    *,
    services: Services,
    conversation: Conversation | None = None,
    episode: Episode | None = None,
) -> Sequence[Sample]:
    """Play an episode: calls of tools are answered, other turns are the environment's, or the answer.

    It is TRUNCATED where a limit ends it: of turns, of time, or of tokens, those that the policy would be told next
    included. The reward is the environment's verdict where it answers back, also of a truncated episode.

    ``conversation`` is what was said before, to be gone on with, and ``episode`` the same in tokens; by default the
    prompt's.

    Raises:
        PluginError: If the environment takes one turn only.
        RewardError: If the environment gives no reward.
    """
    conversation = conversation or Conversation(
        request.prompt,
        services.tokenizer,
        rewritten=services.rewritten_turns,
        pictures=None if services.picture_input is None else services.picture_input.pictures,
    )
    return await _Play(request, services, conversation, episode or Episode(request, services)).play()


class _Play:
    """One episode under way."""

    def __init__(
        self, request: RolloutRequest, services: Services, conversation: Conversation, episode: Episode
    ) -> None:
        prompt, box = request.prompt, services.tools
        self._request = request
        self._episode = episode
        self._conversation = conversation
        self._seeing = services.picture_input
        self._game = _Game(prompt.metadata, services) if prompt.metadata.get(MULTI_TURN) else None
        self._environment_judges = services.environments_judge
        self._calling = Calling(prompt, services, self._episode) if may_call(prompt, services) else None
        self._max_turns = sys.maxsize if box is None else box.max_turns
        self._ends_at = float("inf") if box is None else asyncio.get_running_loop().time() + box.max_seconds

    async def play(self) -> list[Sample]:
        try:
            return await self._played()
        finally:
            if self._game is not None:
                await self._game.close()

    async def _played(self) -> list[Sample]:
        episode, limit = self._episode, None
        if not episode.builder.remaining_budget:
            sample = episode.builder.build(SampleStatus.TRUNCATED, response="")
            return self._judged([sample], await self._given_up(), ended_by=self._scarce())
        while True:
            begun = len(episode.builder.token_ids)
            turn = await episode.sample()
            if turn.finish_reason.kind is FinishKind.ABORT:
                return episode.end(turn)
            limit = self._scarce() if turn.finish_reason.kind is FinishKind.LENGTH else None
            # Of a turn that was resumed, the completion has the last piece only.
            said = episode.builder.token_ids[begun:]
            spoken = None if self._calling is None else self._calling.read(said)
            messages: Sequence[Message] = ()
            forms: Sequence[Message] = ()
            if self._calling and spoken and spoken.calls:
                limit = limit or self._reached()
                if limit is None:
                    messages, forms = await self._calling.answer(spoken)
            elif self._game is None:
                return self._judged(episode.end(turn), None, ended_by=limit)
            elif limit is None:
                step = await self._game.step(turn.text)
                if step.verdict is not None:
                    return self._judged(episode.end(turn), step.verdict, ended_by=None)
                messages = step.messages
            limit = limit or self._reached()
            if limit is None and not episode.follow(await self._told(said, messages, forms)):
                limit = self._scarce()
            if limit is not None:
                return self._judged(episode.end(turn), await self._given_up(), ended_by=limit)

    async def _told(self, said: NDArray[np.int32], messages: Sequence[Message], forms: Sequence[Message]) -> FollowUp:
        """Return what is sent after a turn, with the pictures that the policy is shown then."""
        images: Sequence[Picture] = ()
        if any(not isinstance(message.get("content"), str) for message in messages):
            loader = None if self._seeing is None or self._seeing.pictures is None else self._seeing.loader
            placing = Placing(
                (),
                (),
                load=lambda part: needed(loader).load(part),
                load_video=lambda part: needed(loader).load_video(part),
            )
            messages = await asyncio.to_thread(placing.in_messages, messages)
            images = placing.pictures
        before = self._episode.builder.images
        return self._conversation.follow_up(said, messages, forms=forms, images=images, before=before)

    async def _given_up(self) -> Verdict | None:
        return None if self._game is None else await self._game.give_up()

    def _reached(self) -> str | None:
        """Return the limit that lets no further turn be sampled."""
        if self._episode.num_turns >= self._max_turns:
            return "max_turns"
        return "max_seconds" if asyncio.get_running_loop().time() >= self._ends_at else None

    def _scarce(self) -> str:
        """Return the limit of tokens that is reached first."""
        builder, request = self._episode.builder, self._request
        in_context = request.max_context_length - len(builder.token_ids)
        return "max_context" if in_context < request.params.max_new_tokens - builder.num_spent else "max_tokens"

    def _judged(self, samples: Sequence[Sample], verdict: Verdict | None, *, ended_by: str | None) -> list[Sample]:
        *forks, last = samples
        about: dict[str, Any] = {NUM_TURNS: self._episode.num_turns}
        if self._calling is not None:
            about |= {NUM_CALLS: self._calling.num_calls, NUM_FAILED_CALLS: self._calling.num_failed}
        if ended_by is not None:
            about[ENDED_BY] = ended_by
        status = SampleStatus.COMPLETED if ended_by is None else SampleStatus.TRUNCATED
        made = [*forks, replace(last, status=status, metadata={**last.metadata, **about})]
        if verdict is None or not self._environment_judges:
            return made
        if verdict.reward is None:
            raise RewardError(f"the episode has no reward: {verdict.detail}")
        return [replace(sample, reward=verdict.reward, correct=verdict.correct) for sample in made]


class _Game:
    """An environment that answers back, and the state that its episode is in."""

    def __init__(self, metadata: Mapping[str, Any], services: Services) -> None:
        self._name: str = metadata["environment"]
        self._params = metadata["params"]
        self._state: Mapping[str, Any] | None = None
        self._services = services
        self._path = services.environments.steps_path(self._name)
        self._environment = services.environments.get(self._name) if self._path is None else None
        if self._path is None and not isinstance(self._environment, MultiTurnEnvironment):
            raise PluginError(f"environment {self._name}: it has no start, step and give_up")

    async def step(self, text: str) -> EnvironmentStep:
        step: EnvironmentStep = await self._asked("step", EnvironmentStep, await self._begun(), text)
        if step.verdict is None:
            self._state = step.state
        return step

    async def give_up(self) -> Verdict:
        verdict: Verdict = await self._asked("give_up", Verdict, await self._begun())
        return verdict

    async def close(self) -> None:
        if self._state is not None and isinstance(self._environment, ServedEnvironment):
            await self._environment.close(self._state)

    async def _begun(self) -> Mapping[str, Any]:
        if self._state is None:
            self._state = await self._asked("start", Mapping, self._params)
        return self._state

    async def _asked(self, method: str, kind: type[Any], *arguments: Any) -> Any:
        where = f"environment {self._name}: {method}"
        try:
            deadline = self._services.step_timeout_seconds
            if self._path is None:
                given = getattr(self._environment, method)(*arguments)
                if isinstance(self._environment, ServedEnvironment):
                    async with asyncio.timeout(deadline):
                        given = await given
            else:
                given = await self._services.workers.call(self._path, [method, *arguments], deadline_seconds=deadline)
                given = given if kind is Mapping else msgspec.convert(given, kind)
        except WorkerCallError as error:
            raise RewardError(str(error)) from error
        except WorkerError as error:
            raise RewardError(f"{where}: {error}") from error
        except Exception as error:
            raise RewardError(f"{where} raised {describe(error)}") from error
        if not isinstance(given, kind):
            raise RewardError(f"{where} returned {given!r:.80}; that must be of {kind.__name__}")
        return given
