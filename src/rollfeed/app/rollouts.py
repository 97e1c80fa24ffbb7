"""From a :class:`RolloutConfig` and its parts to a rollout manager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rollfeed import plugins
from rollfeed.app.marker_watch import MarkerWatch
from rollfeed.app.reward_keys import KeyedCut, needs_keyed_cut
from rollfeed.app.rewards import RewardServices, reward_hub
from rollfeed.batch import AgeLimit, OverlongPenalty, cut_batch
from rollfeed.buffer import Buffer, Spill, built_in_policy
from rollfeed.config import RolloutConfig, RolloutMode, StalenessPolicy
from rollfeed.errors import ConfigError
from rollfeed.filters import compose
from rollfeed.generate import single_turn
from rollfeed.history import LengthHistory
from rollfeed.pipeline import (
    GroupPlan,
    Observers,
    OverSampling,
    Placement,
    RolloutParts,
    Rollouts,
    Scheduler,
    WeightFollower,
)
from rollfeed.protocols import (
    AdvantageFn,
    BatchCutter,
    BatchedRewardFn,
    BatchFilter,
    BufferPolicy,
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
from rollfeed.types import RunState, SamplingParams, StepCommit
from rollfeed.weights import EngineProof, WeightDirectory


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
    spill: Spill | None = None,
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
        spill: Where partial answers wait that are over ``buffer_memory_mb``; without it all stay in memory.
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
    parts = _parts(config, engine, services=services, graders=graders or {}, state=state, spill=spill)
    return Rollouts(
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


def _parts(
    config: RolloutConfig,
    engine: Engine,
    *,
    services: RewardServices,
    graders: Mapping[str, Grader],
    state: RunState | None,
    spill: Spill | None,
) -> RolloutParts:
    proof = None if config.weights.proof.num_texts == 0 else EngineProof(engine)
    return RolloutParts(
        generate_fn=config.generate or single_turn,
        default_generate_fn=single_turn,
        rollout_fn=config.rollout or _scheduler(config),
        scorer=reward_hub(
            config, services, graders=graders, rm_type=config.rm_type, reward_key=config.reward_key, seed=config.seed
        ),
        group_filter=compose(config.group_filters),
        cut_batch=_batch_cutter(config),
        surplus_rule=_surplus_rule(config),
        sample_hook=config.sample_hook,
        buffer=_buffer(config, spill),
        placement=_placement(config, state),
        weights=_weight_follower(config, engine, proof),
        proof=proof,
    )


def _batch_cutter(config: RolloutConfig) -> BatchCutter:
    overlong = None
    if config.overlong is not None:
        length = config.overlong.length or config.sampling.rollout_max_response_len
        overlong = OverlongPenalty(length=length, cache=config.overlong.cache, factor=config.overlong.factor)
    cut = partial(
        cut_batch,
        age_rule=_age_limit(config),
        reward_key=config.reward_key,
        estimator=config.estimator,
        advantage_fn=config.advantage,
        overlong=overlong,
        mask_truncated=config.mask_truncated,
    )
    return KeyedCut(cut, reward_key=str(config.reward_key)) if needs_keyed_cut(config) else cut


def _check_functions(config: RolloutConfig, source: PromptSource) -> None:
    wanted: list[tuple[str, Any, type[Any]]] = [
        ("generate", config.generate, GenerateFn),
        ("rollout", config.rollout, RolloutFn),
        ("reward", config.reward, RewardFn),
        ("batched_reward", config.batched_reward, BatchedRewardFn),
        ("group_reward", config.group_reward, GroupRewardFn),
        ("batch_filter", config.batch_filter, BatchFilter),
        ("buffer_policy", config.buffer_policy, BufferPolicy),
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


def _age_limit(config: RolloutConfig) -> AgeLimit:
    return AgeLimit(max_staleness=config.max_staleness, policy=config.staleness_policy)


def _surplus_rule(config: RolloutConfig) -> AgeLimit:
    if config.mask_offpolicy_in_partial_rollout and config.mode is not RolloutMode.ASYNC:
        return AgeLimit(max_staleness=0, policy=StalenessPolicy.MASK)
    return _age_limit(config)


def _scheduler(config: RolloutConfig) -> Scheduler:
    return Scheduler(settings=config, age_rule=_age_limit(config), over_sampling=_over_sampling(config))


def _buffer(config: RolloutConfig, spill: Spill | None) -> Buffer:
    policy = config.buffer_policy or built_in_policy(config.buffer.policy, staleness_limit=config.max_staleness)
    return Buffer(
        policy,
        n_samples_per_prompt=config.n_samples_per_prompt,
        max_bytes=config.buffer.max_memory_mb << 20,
        spill=spill,
    )


def _placement(config: RolloutConfig, state: RunState | None) -> Placement:
    chosen = config.placement
    if not (chosen.long_first or chosen.tail_batching):
        return Placement()
    history = LengthHistory()
    if state is not None and state.lengths:
        history.load_state_dict(state.lengths)
    round_size = config.first_submission if chosen.tail_batching else None
    return Placement(history, long_first=chosen.long_first, round_size=round_size)


def _weight_follower(config: RolloutConfig, engine: Engine, proof: EngineProof | None) -> WeightFollower | None:
    weights = config.weights
    if weights.directory is None:
        return None
    return WeightFollower(
        WeightDirectory(Path(weights.directory), poll_seconds=weights.poll_seconds),
        engine,
        proof=proof,
        max_lag=(config.max_staleness or 0) if config.mode is RolloutMode.ASYNC else 0,
        poll_seconds=weights.poll_seconds,
        timeout_seconds=weights.timeout_seconds,
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
        return_sampling_mask=sampling.return_sampling_mask,
    )
    return GroupPlan(settings=config, seed=config.seed, params=params, max_context_length=max_context_length)
