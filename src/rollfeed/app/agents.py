"""Episodes of agents as samples, without a run around them, and as generate functions of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollfeed import protocols
from rollfeed.app.model import Endpoint
from rollfeed.base.waiting import all_at_once
from rollfeed.config.tools import ToolSettings
from rollfeed.conversations import Conversation
from rollfeed.environments import EnvironmentRegistry
from rollfeed.errors import ConfigError
from rollfeed.generate import Episode, default_generate, multi_turn
from rollfeed.prompts import ChatRenderer, load_tokenizer
from rollfeed.protocols import (
    MULTI_TURN,
    OWN_CONTEXT,
    MultiTurnEnvironment,
    RewrittenTurns,
    RolloutRequest,
    Services,
    Tokenizer,
)
from rollfeed.tools import LimitedToolbox
from rollfeed.types import Message, Prompt, Sample, SamplingParams

Asked: TypeAlias = str | Sequence[Message] | Sample | RolloutRequest
"""A question, messages, a finished sample to be gone on with, or the request of a run."""

MESSAGES = "messages"
"""Key of a sample's metadata: the whole conversation."""
_ANY_LENGTH = 2**31 - 1
_LIMITS = ToolSettings(timeout_seconds=60.0, max_output_chars=10_000, max_seconds=3600.0)


async def agent_rollout_to_sample(
    prompt: Asked,
    environment_cls: Callable[[], object] | None = None,
    endpoint: protocols.TokenEndpoint | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    max_turns: int = 10,
    *,
    environment: object | None = None,
    messages: Sequence[Message] = (),
    metadata: Mapping[str, Any] | None = None,
    params: SamplingParams | None = None,
    services: Services | None = None,
) -> Sample:
    """Play one episode and return it as a sample whose tokens are those that were sent and sampled.

    Turns that a chat template would show otherwise later stay as they were sampled (``append``).

    Args:
        prompt: A question, messages, a finished sample, whose tokens are kept and which ``messages`` goes on with, or
            the request of a run, whose metadata and params are the sample's.
        environment_cls: Makes the environment. It may have ``tools`` (:class:`rollfeed.protocols.Tool`), and methods of
            a :class:`rollfeed.protocols.MultiTurnEnvironment`, or ``verify(params, response)`` alone; params are
            ``metadata["params"]``, and what it gives is the reward.
        endpoint: The policy; an :class:`Endpoint` that is not open is opened for the episode.
        tokenizer: The policy's, or its folder; by default the endpoint's.
        max_turns: Turns of the policy; the sample is TRUNCATED then.
        environment: The environment itself, instead of ``environment_cls``.
        messages: What is said next, after a sample.
        metadata: Goes into the sample's.
        params: By default the whole context is the budget.
        services: Of a run, whose endpoint and tokenizer are the default.

    Raises:
        ConfigError: If an argument is missing or does not fit.
    """
    if max_turns < 1:
        raise ConfigError(f"max_turns = {max_turns}: must be at least 1")
    made = environment_cls() if environment is None and environment_cls is not None else environment
    agent = _Agent(made, max_turns=max_turns)
    async with AsyncExitStack() as stack:
        policy = services.endpoint if endpoint is None and services is not None else endpoint
        if policy is None:
            raise ConfigError("endpoint is missing: give an Endpoint(provider=..., model=...), or services.endpoint")
        if isinstance(policy, Endpoint):
            await stack.enter_async_context(policy)
        asked = _Question(policy, _tokenizer_of(tokenizer, policy, services), metadata or {}, params)
        box = await stack.enter_async_context(agent.toolbox())
        return await _play(asked, agent, box, prompt, messages, services)


async def generate_rollout_batch(
    prompts: RolloutRequest | Sequence[str | Sequence[Message]],
    environment_cls: Callable[[], object] | None = None,
    endpoint: protocols.TokenEndpoint | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    max_turns: int = 10,
    metadata_list: Sequence[Mapping[str, Any]] | None = None,
    *,
    services: Services | None = None,
) -> list[Sample]:
    """Play an episode for each prompt, all at once, and return their samples in order.

    A ``functools.partial`` of it with an ``environment_cls`` is a generate function (``plugins.generate``): a run gives
    it a request and its services, and what an episode has done survives a kill.

    Raises:
        ConfigError: As :func:`agent_rollout_to_sample`; if there are not as many ``metadata_list`` as prompts.
    """
    if isinstance(prompts, RolloutRequest):
        return [
            await agent_rollout_to_sample(prompts, environment_cls, endpoint, tokenizer, max_turns, services=services)
        ]
    about: Sequence[Mapping[str, Any]] = [{}] * len(prompts) if metadata_list is None else metadata_list
    if len(about) != len(prompts):
        raise ConfigError(f"metadata_list has {len(about)} entries for {len(prompts)} prompts")
    async with AsyncExitStack() as stack:
        if isinstance(endpoint, Endpoint):
            await stack.enter_async_context(endpoint)
        samples = await all_at_once(
            agent_rollout_to_sample(
                prompt, environment_cls, endpoint, tokenizer, max_turns, metadata=each, services=services
            )
            for prompt, each in zip(prompts, about, strict=True)
        )
    return [replace(sample, index=index, rollout_id=index, group_index=index) for index, sample in enumerate(samples)]


@dataclass(frozen=True, slots=True)
class _Question:
    """Makes a prompt, in any of its forms, the request of an episode."""

    endpoint: protocols.TokenEndpoint
    tokenizer: Tokenizer
    metadata: Mapping[str, Any]
    params: SamplingParams | None

    def conversation(self, prompt: Prompt) -> Conversation:
        return Conversation(prompt, self.tokenizer, rewritten=RewrittenTurns.APPEND)

    def request(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], is_introduced: bool = False
    ) -> RolloutRequest:
        """Ask messages, which say of tools that a template does not show where they were introduced before."""
        renderer = ChatRenderer(self.tokenizer, rollout_max_prompt_len=None, tools=() if is_introduced else tools)
        rendered = renderer.render(messages, apply_chat_template=True, tools=tools or None)
        context_length = getattr(self.endpoint, "context_length", None)
        if context_length is None and self.params is None:
            raise ConfigError("params are missing: the endpoint does not say how long its context is")
        return RolloutRequest(
            prompt=Prompt(
                prompt_id="agent",
                source="agent",
                text=rendered.text,
                token_ids=rendered.token_ids,
                messages=rendered.messages,
                metadata=self.metadata,
                tools=rendered.tools,
            ),
            params=self.params or SamplingParams(max_new_tokens=context_length or 0),
            group_index=0,
            index=0,
            rollout_id=0,
            step=0,
            max_context_length=_ANY_LENGTH if context_length is None else context_length,
        )


class _Agent:
    """What plays: an environment in any of its forms, and its tools."""

    def __init__(self, environment: object | None, *, max_turns: int) -> None:
        self._environment: Any = environment
        self._max_turns = max_turns

    def toolbox(self) -> LimitedToolbox:
        limits = _LIMITS.model_copy(update={"max_turns": self._max_turns})
        return LimitedToolbox(tuple(getattr(self._environment, "tools", ())), limits)

    def registry(self) -> EnvironmentRegistry:
        return EnvironmentRegistry([self._environment] if self._answers_back else ())

    def metadata(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._answers_back:
            return given
        name = self._environment.environment_id
        return {"params": {}, **given, "environment": name, MULTI_TURN: True}

    def judged(self, sample: Sample, params: Mapping[str, Any]) -> Sample:
        verify = getattr(self._environment, "verify", None)
        if sample.reward is not None or verify is None:
            return sample
        verdict = verify(params, sample.response)
        return replace(sample, reward=verdict.reward, correct=verdict.correct)

    @property
    def _answers_back(self) -> bool:
        return isinstance(self._environment, MultiTurnEnvironment)


async def _play(
    asked: _Question,
    agent: _Agent,
    box: LimitedToolbox,
    prompt: Asked,
    messages: Sequence[Message],
    services: Services | None,
) -> Sample:
    conversation: Conversation | None = None
    told: NDArray[np.int32] | None = None
    if isinstance(prompt, Sample):
        request, conversation, told = _of_a_sample(prompt, asked, messages, tools=box.definitions)
    elif isinstance(prompt, RolloutRequest):
        request = _of_a_run(prompt, asked, box)
    else:
        said: Sequence[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        request = asked.request(said, tools=box.definitions)
    metadata = agent.metadata(request.prompt.metadata)
    request = replace(request, prompt=replace(request.prompt, metadata=metadata))
    given = replace(
        services or Services(endpoint=asked.endpoint, tokenizer=asked.tokenizer, default=default_generate),
        endpoint=asked.endpoint,
        tokenizer=asked.tokenizer,
        environments=agent.registry(),
        tools=box,
    )
    conversation = conversation or asked.conversation(request.prompt)
    episode = Episode(request, given)
    if isinstance(prompt, Sample) and told is not None:
        episode.go_on_behind(prompt, told)
    (sample,) = await multi_turn(request, services=given, conversation=conversation, episode=episode)
    spoken = [*conversation.messages, {"role": "assistant", "content": sample.response}]
    sample = replace(sample, metadata={**sample.metadata, MESSAGES: spoken})
    return agent.judged(sample, metadata.get("params", {}))


def _of_a_run(request: RolloutRequest, asked: _Question, box: LimitedToolbox) -> RolloutRequest:
    """Return a run's request, its prompt shown with the tools where there are any."""
    prompt = request.prompt
    if not box.definitions:
        return request
    if prompt.messages is None:
        raise ConfigError(f"prompt {prompt.prompt_id}: tools need a prompt with the chat template")
    shown = replace(asked, params=request.params).request(prompt.messages, tools=box.definitions).prompt
    metadata = {**prompt.metadata, OWN_CONTEXT: True}
    prompt = replace(shown, prompt_id=prompt.prompt_id, source=prompt.source, label=prompt.label, metadata=metadata)
    return replace(request, prompt=prompt)


def _of_a_sample(
    before: Sample, asked: _Question, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]]
) -> tuple[RolloutRequest, Conversation, NDArray[np.int32]]:
    """Return the request of a finished sample, its conversation with what is said next, and the tokens of that."""
    history = list(before.metadata.get(MESSAGES, ()))
    if not history or not messages:
        raise ConfigError(
            f"sample {before.index} cannot be gone on with: it needs messages to be told, and its conversation under "
            f"{MESSAGES!r} in its metadata, as agent_rollout_to_sample leaves it"
        )
    request = asked.request(history[:-1], tools=tools, is_introduced=True)
    conversation = asked.conversation(request.prompt)
    told = conversation.follow_up(_last_turn(before), messages).token_ids
    metadata = {key: value for key, value in before.metadata.items() if key != MESSAGES} | dict(asked.metadata)
    request = replace(
        request,
        prompt=replace(request.prompt, token_ids=before.token_ids[: before.prompt_length], metadata=metadata),
        # What is there does not count.
        params=replace(
            request.params, max_new_tokens=request.params.max_new_tokens + before.response_length + len(told)
        ),
        group_index=before.group_index,
        index=before.index,
        rollout_id=before.rollout_id,
    )
    return request, conversation, told


def _last_turn(sample: Sample) -> NDArray[np.int32]:
    """Return the tokens that were sampled last, ``(T,)``."""
    trained = sample.loss_mask > 0.0
    behind = len(trained) - int(np.argmax(trained[::-1])) if trained.any() else 0
    others = np.flatnonzero(~trained[:behind])
    first = int(others[-1]) + 1 if len(others) else 0
    return sample.response_token_ids[first:behind]


def _tokenizer_of(given: Tokenizer | str | Path | None, endpoint: object, services: Services | None) -> Tokenizer:
    if isinstance(given, str | Path):
        return load_tokenizer(Path(given))
    if given is not None:
        return given
    if isinstance(endpoint, Endpoint):
        return endpoint.tokenizer
    if services is None:
        raise ConfigError("tokenizer is missing: give the policy's, or the folder that it is in")
    return services.tokenizer
