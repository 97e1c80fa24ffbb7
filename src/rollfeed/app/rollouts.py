"""From a :class:`RolloutConfig` and its parts to a rollout manager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollfeed import plugins
from rollfeed.app.marker_watch import MarkerWatch
from rollfeed.app.rewards import RewardServices, in_its_place
from rollfeed.batch import cut_batch, group_advantages
from rollfeed.config import RolloutConfig
from rollfeed.errors import ConfigError
from rollfeed.filters import compose
from rollfeed.generate import single_turn
from rollfeed.pipeline import GroupPlan, Observers, OverSampling, RolloutParts, Rollouts, Scheduler, StalenessClock
from rollfeed.protocols import (
    AdvantageFn,
    BatchedRewardFn,
    BatchFilter,
    Engine,
    GenerateFn,
    Grader,
    GroupFilter,
    GroupRewardFn,
    Isolation,
    PromptSource,
    RewardFn,
    RolloutFn,
    RolloutObserver,
    SampleHook,
    Tokenizer,
)
from rollfeed.rewards import RewardHub
from rollfeed.types import RunState, SamplingParams, StepCommit


def open_rollouts(
    config: RolloutConfig,
    *,
    source: PromptSource,
    engine: Engine,
    tokenizer: Tokenizer,
    graders: Mapping[str, Grader] | None = None,
    state: RunState | None = None,
    commit: Callable[[StepCommit], None] | None = None,
    observers: Sequence[RolloutObserver] = (),
    on_isolation: Callable[[Isolation], None] | None = None,
) -> Rollouts:
    """Return a rollout manager; enter it with ``async with``, then call ``generate_batch()``.

    Args:
        config: Numbers and functions of the run.
        source: Where prompts come from.
        engine: Started and ended by the manager.
        tokenizer: The policy's.
        graders: Further graders by ``rm_type``.
        state: Where an earlier run stopped; by default the beginning.
        commit: Stores a step before it is delivered; called in a thread.
        observers: Told what happens as it happens.
        on_isolation: Told once at which isolation level programs of the policy run, when the first one does.

    Raises:
        ConfigError: If a function does not fit its protocol, or the settings do not fit the engine.
    """
    _check_functions(config, source)
    max_context_length = config.sampling.rollout_max_context_len or engine.context_length
    if max_context_length > engine.context_length:
        raise ConfigError(
            f"rollout_max_context_len = {max_context_length}: the engine takes {engine.context_length} tokens; lower it"
        )
    services = _reward_services(config, on_isolation)
    parts = RolloutParts(
        generate_fn=config.generate or single_turn,
        default_generate_fn=single_turn,
        rollout_fn=config.rollout or _scheduler(config),
        scorer=_reward_hub(config, services, graders or {}),
        group_filter=compose(config.group_filters),
        cut_batch=partial(cut_batch, reward_key=config.reward_key, advantage_fn=config.advantage or group_advantages),
        sample_hook=config.sample_hook,
    )
    return Rollouts(
        settings=config,
        plan=_group_plan(config, max_context_length),
        parts=parts,
        source=source,
        engine=engine,
        tokenizer=tokenizer,
        state=state,
        commit=commit,
        observers=Observers([*observers, MarkerWatch(rm_type=config.rm_type)]),
        services=services,
    )


def _check_functions(config: RolloutConfig, source: PromptSource) -> None:
    wanted: list[tuple[str, Any, type[Any]]] = [
        ("generate", config.generate, GenerateFn),
        ("rollout", config.rollout, RolloutFn),
        ("reward", config.reward, RewardFn),
        ("batched_reward", config.batched_reward, BatchedRewardFn),
        ("group_reward", config.group_reward, GroupRewardFn),
        ("batch_filter", config.batch_filter, BatchFilter),
        ("sample_hook", config.sample_hook, SampleHook),
        ("advantage", config.advantage, AdvantageFn),
        *(("group_filters", each, GroupFilter) for each in config.group_filters),
        *((f"named_rewards[{name!r}]", each, RewardFn) for name, each in config.named_rewards.items()),
    ]
    for name, function, protocol in wanted:
        if function is not None:
            plugins.check_fits(function, protocol, key=name)
    plugins.check_methods(source, PromptSource, key="source")


def _reward_services(config: RolloutConfig, on_isolation: Callable[[Isolation], None] | None) -> RewardServices:
    return RewardServices(
        workers=config.reward_workers,
        code=config.code_reward,
        remote=config.remote_reward,
        on_isolation=on_isolation,
        rm_type=config.rm_type,
    )


def _reward_hub(config: RolloutConfig, services: RewardServices, graders: Mapping[str, Grader]) -> RewardHub:
    def place(function: Any) -> Any:
        return in_its_place(function, services.workers, timeout_seconds=config.reward_timeout_seconds)

    return RewardHub(
        graders={**services.graders(), **graders},
        rm_type=config.rm_type,
        reward_fn=place(config.reward),
        batched_reward_fn=place(config.batched_reward),
        group_reward_fn=place(config.group_reward),
        named_reward_fns={name: place(function) for name, function in config.named_rewards.items()},
        reward_key=config.reward_key,
        seed=config.seed,
        timeout_seconds=config.reward_timeout_seconds,
        workers=services.workers,
        worker_timeout_seconds=services.worker_timeout_seconds,
    )


def _scheduler(config: RolloutConfig) -> Scheduler:
    return Scheduler(
        mode=config.mode,
        refill=config.refill,
        deterministic=config.deterministic,
        surplus=config.surplus,
        requeue_aborted=config.requeue_aborted,
        group_failure=config.group_failure,
        max_draws_per_batch=config.max_draws_per_batch,
        staleness=StalenessClock(max_staleness=config.max_staleness, rollout_batch_size=config.rollout_batch_size),
        staleness_policy=config.staleness_policy,
        over_sampling=_over_sampling(config),
    )


def _over_sampling(config: RolloutConfig) -> OverSampling | None:
    if config.batch_filter is None:
        return None
    num_extra = config.num_extra_groups or config.first_submission - config.rollout_batch_size
    return OverSampling(config.batch_filter, num_extra)


def _group_plan(config: RolloutConfig, max_context_length: int) -> GroupPlan:
    sampling = config.sampling
    params = SamplingParams(
        max_new_tokens=sampling.rollout_max_response_len,
        temperature=sampling.rollout_temperature,
        top_p=sampling.rollout_top_p,
        top_k=sampling.rollout_top_k,
        min_new_tokens=sampling.min_new_tokens,
        repetition_penalty=sampling.repetition_penalty,
        stop=sampling.rollout_stop,
        stop_token_ids=sampling.rollout_stop_token_ids,
        skip_special_tokens=sampling.rollout_skip_special_tokens,
    )
    return GroupPlan(
        run_seed=config.seed,
        n_samples_per_prompt=config.n_samples_per_prompt,
        params=params,
        max_context_length=max_context_length,
        rollout_timeout_seconds=config.rollout_timeout_seconds,
        failure_policy=config.group_failure,
        failure_retries=config.failure_retries,
        mask_offpolicy=config.mask_offpolicy_in_partial_rollout,
    )
