"""Names of an early rollout library, on top of ours: group checks, ``RolloutConfig``, ``AsyncRolloutManager``.

docs/early-names.md says name by name what is as it was there. Written as a program of yours would be: with what
``import rollfeed`` offers.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

import rollfeed
from rollfeed import protocols
from rollfeed.base.importing import is_async
from rollfeed.compat.slime_plugins.names.slime_sample import SlimeSample
from rollfeed.compat.slime_plugins.read_back import own_sample
from rollfeed.completions import LARGEST_VOCABULARY
from rollfeed.config import RolloutConfig as OwnConfig
from rollfeed.config import RolloutSettings
from rollfeed.engine.idle import IdleEngine
from rollfeed.errors import ConfigError, RewardError
from rollfeed.faults import complaint
from rollfeed.protocols import OWN_CONTEXT, Engine, PromptSource, RolloutRequest, Services, Tokenizer
from rollfeed.types import Drop, FilterDecision, Keep, Prompt, Sample, SampleStatus, TrainBatch, are_equal

F = TypeVar("F", bound=Callable[..., Any])
_PROMPT = "early_prompt"
"""Key of a prompt's metadata: the prompt as the buffer gave it, where that is no text."""


def _rollouts(samples: Sequence[Any]) -> list[Any]:
    """Return one sample of each rollout, the last; samples that name none are one each."""
    if not samples:
        raise RewardError("a group without samples")
    named = [getattr(each, "rollout_id", None) for each in samples]
    return list({id(each) if name is None else name: each for name, each in zip(named, samples, strict=True)}.values())


def _rewards(samples: Sequence[Any]) -> list[float]:
    rewards = [each.reward for each in _rollouts(samples)]
    if wrong := [each for each in rewards if isinstance(each, bool | str | Mapping) or each is None]:
        raise RewardError(f"reward {wrong[0]!r:.80}: a number is needed; check it with a function of your own")
    return [float(each) for each in rewards]


def check_reward_nonzero_std(samples: Sequence[Any]) -> bool:
    """Whether rewards of the group differ."""
    return not bool(are_equal(np.array(_rewards(samples), np.float64)))


def check_min_reward(samples: Sequence[Any], threshold: float = 0.5) -> bool:
    """Whether a reward of the group is above ``threshold``."""
    return max(_rewards(samples)) > threshold


def check_response_diversity(samples: Sequence[Any], min_unique_ratio: float = 0.5) -> bool:
    """Whether at least this share of the group's responses are different texts."""
    responses: list[str] = [each.response for each in _rollouts(samples)]
    return len(set(responses)) / len(responses) >= min_unique_ratio


def check_reasonable_length(samples: Sequence[Any], min_tokens: int = 10, max_tokens: int = 2048) -> bool:
    """Whether the mean response of the group has this many tokens, both bounds included."""
    return min_tokens <= float(np.mean([each.response_length for each in _rollouts(samples)])) <= max_tokens


def check_any_success(samples: Sequence[Any]) -> bool:
    """Whether a rollout of the group is completed: neither truncated, aborted nor failed."""
    return any(each.status.value == SampleStatus.COMPLETED.value for each in _rollouts(samples))


def check_quality_and_diversity(samples: Sequence[Any]) -> bool:
    """Whether rewards differ, and at least half of the responses are different texts."""
    return check_reward_nonzero_std(samples) and check_response_diversity(samples)


def keep_if(check: Callable[[Sequence[Any]], Any]) -> protocols.GroupFilter:
    """Return the group filter, for ``plugins.group_filters``, that keeps groups of which ``check`` says True."""

    def decide(samples: Sequence[Sample]) -> FilterDecision:
        kept = check(samples)
        if not isinstance(kept, bool | np.bool_):
            raise complaint("filter_fn", check, f"returned {kept!r:.80}; it must return True (keep) or False (drop)")
        return Keep() if kept else Drop(getattr(check, "__name__", "filter_fn"))

    return _standing_for(check, decide)


def _standing_for(function: Callable[..., Any], made: F) -> F:
    """Return a function of ours whose errors name the user's."""
    vars(made).update(__signature__=inspect.signature(made), __wrapped__=function)
    return made


@dataclass(frozen=True)
class EarlyRolloutConfig:
    """The settings of an :class:`AsyncRolloutManager`.

    Raises:
        ConfigError: If a number is out of its range.
    """

    batch_size: int
    """Prompts of a batch, each with all its samples."""
    n_samples_per_prompt: int = 1
    over_sampling_factor: float = 1.0
    """Prompts that are begun, as a multiple of the batch."""
    generate_fn: Callable[..., Any] | None = None
    """``f([prompt]) -> [samples]``, called once a sample; or a ``GenerateFn``; by default the built-in one."""
    reward_fn: Callable[..., Any] | None = None
    """``f(sample) -> number``, or a ``RewardFn``; it goes before rewards that samples bring."""
    filter_fn: Callable[..., Any] | None = None
    """``f(samples) -> bool``, True keeps."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "n_samples_per_prompt", "over_sampling_factor"):
            value, is_whole = getattr(self, name), name != "over_sampling_factor"
            if not isinstance(value, int if is_whole else int | float) or not value >= 1:
                told = ", and a whole number" if is_whole else ""
                raise ConfigError(f"{name} = {value!r}: must be at least 1{told}")


RolloutConfig = EarlyRolloutConfig
"""As it was called."""


class AsyncRolloutManager:
    """Makes batches with :class:`rollfeed.pipeline.Rollouts`; the first starts what is needed, :meth:`close` ends it.

    Args:
        config: Sizes and functions. The two may come in either order.
        data_buffer: A ``PromptSource``, or an object with ``get_prompts(n)``, which returns texts, lists of messages,
            or what else ``generate_fn`` takes.
        engine: Samples; not needed where ``generate_fn`` asks its own, and brings the log-probabilities.
        tokenizer: The policy's; needed with an engine.
        settings: Further settings of the run, its seed among them.

    Raises:
        ConfigError: If arguments are missing or of another kind.
    """

    def __init__(
        self,
        config: EarlyRolloutConfig,
        data_buffer: Any,
        *,
        engine: Engine | None = None,
        tokenizer: Tokenizer | None = None,
        settings: OwnConfig | None = None,
    ) -> None:
        if isinstance(data_buffer, EarlyRolloutConfig):
            config, data_buffer = data_buffer, config
        if not isinstance(config, EarlyRolloutConfig):
            raise ConfigError(f"config is a {type(config).__name__}: give RolloutConfig of rollfeed.compat.early_names")
        if (engine is None) != (tokenizer is None) or (engine is None and _is_native(config.generate_fn)):
            raise ConfigError("give engine and tokenizer together; without both, generate_fn must ask its own engine")
        if not (hasattr(data_buffer, "draw") or callable(getattr(data_buffer, "get_prompts", None))):
            raise ConfigError(f"data_buffer is a {type(data_buffer).__name__}: it needs get_prompts(n), or draw(n)")
        source = data_buffer
        if not hasattr(data_buffer, "draw"):
            source = _EarlySource(data_buffer, tokenizer, needs_text=_is_native(config.generate_fn))
        self._open = partial(
            rollfeed.open_rollouts,
            _settings(config, settings or OwnConfig()),
            source=source,
            engine=engine or IdleEngine(context_length=1 << 31, vocab_size=LARGEST_VOCABULARY),
            tokenizer=cast(Tokenizer, tokenizer),
        )
        self._entered = AsyncExitStack()
        self._rollouts: Any = None

    async def __aenter__(self) -> AsyncRolloutManager:
        if self._rollouts is None:
            self._rollouts = await self._entered.enter_async_context(self._open())
        return self

    async def close(self, *exc_info: object) -> None:
        """End what was started."""
        self._rollouts = None
        await self._entered.aclose()

    __aexit__ = close

    async def generate_batch(self) -> TrainBatch:
        """Make and return the next batch, as :meth:`rollfeed.pipeline.Rollouts.generate_batch`."""
        await self.__aenter__()
        return await self._rollouts.generate_batch()  # type: ignore[no-any-return]


def _settings(config: EarlyRolloutConfig, own: OwnConfig) -> OwnConfig:
    """Return settings of ours that do what an early config says."""
    sizes = {"rollout_batch_size": config.batch_size, "n_samples_per_prompt": config.n_samples_per_prompt}
    factor = {"over_sampling_factor": config.over_sampling_factor} if config.over_sampling_factor > 1 else {}
    functions: dict[str, Any] = {}
    if config.generate_fn is not None:
        functions["generate"] = config.generate_fn if _is_native(config.generate_fn) else _generate(config)
    if (reward := config.reward_fn) is not None:
        takes_prompt = len(inspect.signature(reward).parameters) > 1
        functions["reward"] = reward if takes_prompt else _standing_for(reward, lambda sample, prompt: reward(sample))
    if config.filter_fn is not None:
        functions["group_filters"] = (*own.plugins.group_filters, keep_if(config.filter_fn))
    rollout = RolloutSettings.model_validate({**own.rollout.model_dump(exclude_unset=True), **sizes, **factor})
    return own.model_copy(update={"rollout": rollout, "plugins": own.plugins.model_copy(update=functions)})


def _is_native(generate: Callable[..., Any] | None) -> bool:
    """Whether a function answers requests of ours: it takes ``services``; the built-in one does."""
    return generate is None or "services" in inspect.signature(generate).parameters


def _generate(config: EarlyRolloutConfig) -> Callable[..., Any]:
    """Return a generate function of ours that has an early one answer."""
    function: Callable[..., Any] = config.generate_fn  # type: ignore[assignment]

    async def answer(request: RolloutRequest, *, services: Services) -> list[Sample]:
        prompts = [request.prompt.metadata.get(_PROMPT, request.prompt.text)]
        made = await (function(prompts) if is_async(function) else asyncio.to_thread(function, prompts))
        if not isinstance(made, list) or not made or not all(hasattr(each, "status") for each in made):
            raise complaint("generate_fn", function, f"returned {made!r:.80}; it must return a list of samples")
        try:
            samples = [_read(each, request, services.endpoint.policy_version) for each in made]
        except ValueError as error:
            raise complaint("generate_fn", function, f"returned {error}") from None
        return samples if config.reward_fn is None else [replace(each, reward=None) for each in samples]

    return _standing_for(function, answer)


def _read(made: Any, request: RolloutRequest, policy_version: int) -> Sample:
    """Return a sample of the request: made of one of ours, of slime's, or of one whose mask is as long as its tokens.

    Raises:
        ValueError: If it cannot be trained on; says what is wrong.
    """
    if isinstance(made, Sample):
        prompt_ids = request.prompt.token_ids
        is_other = not np.array_equal(made.token_ids[: len(prompt_ids)], prompt_ids)
        metadata = {**request.prompt.metadata, **made.metadata, **({OWN_CONTEXT: True} if is_other else {})}
        named = {name: getattr(request, name) for name in ("group_index", "index", "rollout_id")}
        return replace(made, label=request.prompt.label, metadata=metadata, **named)
    mask, logprobs = list(made.loss_mask or ()), made.rollout_log_probs
    first = next((at for at, weight in enumerate(mask) if weight), len(mask))
    shown = SlimeSample(
        tokens=list(made.tokens),
        response=made.response,
        response_length=(length := getattr(made, "response_length", len(mask) - first)),
        loss_mask=mask[len(mask) - length :] or None,
        rollout_log_probs=logprobs and list(logprobs)[len(logprobs) - length :],
        label=request.prompt.label,
        reward=made.reward,
        metadata={**request.prompt.metadata, **made.metadata},
        status=SlimeSample.Status("completed" if made.status.value == "pending" else made.status.value),
    )
    return own_sample(shown, request, (), policy_version=policy_version)


class _EarlySource(PromptSource):
    """Prompts of an object that has ``get_prompts(n)``, which keeps its own position."""

    def __init__(self, buffer: Any, tokenizer: Tokenizer | None, *, needs_text: bool) -> None:
        self._buffer, self._tokenizer, self._needs_text, self._num_drawn = buffer, tokenizer, needs_text, 0
        self.__wrapped__ = buffer

    async def draw(self, count: int) -> Sequence[Prompt]:
        """Return the next prompts; without a tokenizer they have no tokens."""
        return [self._prompt(given) for given in self._buffer.get_prompts(count)]

    def _prompt(self, given: Any) -> Prompt:
        if self._needs_text and not isinstance(given, str | list):
            told = f"gave {given!r:.80}; what the engine is asked is a text, or a list of messages"
            raise complaint("data_buffer", self._buffer.get_prompts, told)
        self._num_drawn += 1
        messages = tuple(given) if isinstance(given, list) else None
        text, ids = given if isinstance(given, str) else "", np.empty(0, np.int32)
        if self._tokenizer is not None:
            text = text if messages is None else self._tokenizer.render_chat(messages)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        return Prompt(
            prompt_id=f"buffer/{self._num_drawn - 1}",
            source="buffer",
            text=text,
            token_ids=ids,
            messages=messages,
            label=given.get("label") if isinstance(given, Mapping) else None,
            metadata={} if isinstance(given, str) else {_PROMPT: given},
        )

    def state_dict(self) -> dict[str, Any]:
        """Return how many prompts were drawn."""
        return {"num_drawn": self._num_drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the number of prompts that were drawn."""
        self._num_drawn = state["num_drawn"]
