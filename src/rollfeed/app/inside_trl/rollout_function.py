"""The ``rollout_func`` of TRL's ``GRPOTrainer``: its prompts, answered by an engine of ours with its weights.

Axes: N answers of a call, P tokens of a prompt, R of a response.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from operator import attrgetter
from typing import Any

from transformers import TrainerCallback

from rollfeed.app.build import load_functions
from rollfeed.app.inside_trl.data_rows import PromptTable, load_rows
from rollfeed.app.inside_trl.trained_model import TrainedModel
from rollfeed.app.inside_trl.trainer_settings import as_config, default_engine, find_trl, values_of
from rollfeed.app.model import build_engine
from rollfeed.base.loop_thread import LoopThread
from rollfeed.base.waiting import all_at_once
from rollfeed.config import EngineSettings, GroupFailurePolicy, RolloutConfig
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.pipeline import GroupPlan, Observers
from rollfeed.pipeline.groups import EngineGate, FailureBudget, GroupRunner
from rollfeed.prompts import ColumnKeys
from rollfeed.protocols import RewrittenTurns, RunningGroup, Scorer, TurnJournal
from rollfeed.seeds import derive_seed
from rollfeed.types import Group, Prompt, Rollout, Sample, TensorUpdate, Verdict
from rollfeed.weights import Publisher

_WITHOUT_EFFECT = (
    "filters.dynamic_sampling",
    "filters.over_sampling",
    "plugins.group_filters",
    "plugins.batch_filter",
    "plugins.rollout",
    "plugins.advantage",
)


class RolloutFunc:
    """Answers the prompts of a ``GRPOTrainer``; give it as ``rollout_func``.

    The engine starts at the first call and ends with the training; it has the trainer's weights at every call.

    Args:
        config: Rewards, tools, functions, limits and retries; what TRL's configuration says is not set here.
        engine: By default the embedded one, with room for the longest prompt; or servers by their addresses.
        label_key: The column of labels, where rollfeed scores.
        metadata_key: The column of objects, or their JSON, with what else there is, such as ``rm_type``.
    """

    def __init__(
        self,
        config: RolloutConfig | None = None,
        *,
        engine: EngineSettings | None = None,
        label_key: str | None = None,
        metadata_key: str | None = None,
    ) -> None:
        self._config, self._engine = config or RolloutConfig(), engine
        self._keys = ColumnKeys(label_key=label_key, metadata_key=metadata_key)
        self._answers: _Answers | None = None
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Answer prompts, each of which stands ``num_generations`` times in a row.

        Returns:
            ``prompt_ids``, ``completion_ids`` and ``logprobs``, ``(N, P)`` and twice ``(N, R)``, ragged; ``env_mask``,
            ``(N, R)``, where tokens were inserted; ``rollfeed_reward``, ``(N,)``, where rollfeed scores.

        Raises:
            ConfigError: If the trainer cannot be answered.
            RunFailedError: If an answer cannot be made.
        """
        if self._answers is None or self._answers.trainer() is not trainer:
            self.close()
            self._answers = _Answers(trainer, self._config, self._engine, self._keys)
            if trainer not in self._told:
                trainer.add_callback(_AtTheEnd(self))
                self._told.add(trainer)
        return self._answers.to(prompts, trainer)

    def close(self) -> None:
        """End the engine; the next call starts another."""
        answers, self._answers = self._answers, None
        if answers is not None:
            answers.close()


class _AtTheEnd(TrainerCallback):
    def __init__(self, function: RolloutFunc) -> None:
        self._function = function

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._function.close()


class _NoRewards(Scorer):
    """Leaves it to TRL's reward functions."""

    async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> Sequence[Verdict]:
        return [Verdict(reward=0.0)] * len(rollouts)


class _Answers:
    """An engine for one trainer, and what is asked of it."""

    def __init__(self, trainer: Any, config: RolloutConfig, engine: EngineSettings | None, keys: ColumnKeys) -> None:
        _check(trainer, config, engine)
        self.trainer = weakref.ref(trainer)
        is_set = "rewritten_turns" in config.rollout.model_fields_set
        turns = config.rollout.rewritten_turns if is_set else RewrittenTurns.APPEND  # one sequence an answer
        self._config = as_config(config, trainer.args, group_failure=GroupFailurePolicy.RETRY, rewritten_turns=turns)
        self._scores = bool(config.reward.rm_type or config.plugins.has_reward or keys.metadata_key)
        self._made = load_functions(self._config)
        self._trained = TrainedModel(trainer, with_weights=engine is None or engine.needs_weights)
        self._tokenizer = self._trained.model.tokenizer
        others = trainer.eval_dataset if isinstance(trainer.eval_dataset, Mapping) else {"eval": trainer.eval_dataset}
        scoring = self._config if self._scores else None
        self._table = PromptTable(
            prompt
            for name, rows in {"train_dataset": trainer.train_dataset, **others}.items()
            if rows is not None
            for prompt in load_rows(
                rows, name=name, tokenizer=self._tokenizer, made=self._made, keys=keys, config=scoring
            ).prompts
        )
        longest = self._table.longest + self._config.sampling.rollout_max_response_len
        settings = engine or default_engine(trainer.accelerator.device, context_length=longest)
        if longest > settings.context_length:
            raise ConfigError(
                f"engine.context_length = {settings.context_length}: the longest prompt and max_completion_length "
                f"are {longest} tokens: raise it"
            )
        self._engine = build_engine(self._trained.model, settings, deterministic=self._config.rollout.deterministic)
        self._publisher = Publisher(self._engine, is_proving=False)
        self._state: object = None
        self._version = self._step = 0
        self._num_asked: dict[bool, int] = {}
        self._loop = LoopThread("rollfeed-trl", self._enter())

    def to(self, asked: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        is_training, step, args = trainer.model.training, trainer.state.global_step, trainer.args
        num_answers = args.num_generations if is_training else args.num_generations_eval or args.num_generations
        if step != self._step:
            self._step, self._num_asked = step, {}
        # What is trained on does not depend on evaluations.
        first = self._num_asked.get(is_training, 0)
        groups = [Group(first + number, self._table[each]) for number, each in enumerate(_once(asked, num_answers))]
        self._num_asked[is_training] = first + len(groups)
        # Fused optimizers leave no trace in the versions of parameters, and others may change them within a step.
        if (step, self._trained.state) != self._state:
            self._version += 1
            self._loop.call(
                self._publisher.publish(TensorUpdate(self._trained.tensors(), policy_version=self._version))
            )
            self._state = step, self._trained.state  # merging an adapter changes it
        seed = derive_seed(self._config.seed, "trl", is_training, trainer.accelerator.process_index)
        return self._as_trl(self._loop.call(self._answer(groups, seed=seed, num_answers=num_answers)))

    def close(self) -> None:
        try:
            self._loop.call(self._entered.aclose())
        finally:
            self._loop.close()

    async def _enter(self) -> None:
        async with AsyncExitStack() as entered:
            await entered.enter_async_context(self._made.services)
            await entered.enter_async_context(self._engine)
            self._gate = EngineGate(self._engine, max_requests_in_flight=self._config.rollout.max_requests_in_flight)
            self._entered = entered.pop_all()

    async def _answer(self, groups: Sequence[Group], *, seed: int, num_answers: int) -> list[Rollout]:
        config, made, journal = self._config, self._made, TurnJournal()
        settings = config.rollout.model_copy(update={"n_samples_per_prompt": num_answers})
        plan = GroupPlan(
            settings=settings,
            seed=seed,
            params=config.sampling.params,
            max_context_length=self._engine.context_length,
            generate_fn=made.generate,
            services=made.services.for_generating(self._gate, self._tokenizer, config=config, journal=journal),
            scorer=made.scorer if self._scores else _NoRewards(),
            sample_hook=made.sample_hook,
        )
        failures = FailureBudget(settings)
        runner = GroupRunner(plan, gate=self._gate, failures=failures, observer=Observers())
        running = [
            RunningGroup.of(group, n_samples_per_prompt=num_answers, policy_version=self._version) for group in groups
        ]
        done = await all_at_once(runner.run(each, step=self._step) for each in running)
        failures.report()
        return [rollout for group in done for rollout in group.rollouts]

    def _as_trl(self, rollouts_N: Sequence[Rollout]) -> dict[str, list[Any]]:
        samples_N = [_only_sample(rollout) for rollout in rollouts_N]
        found = {
            "prompt_ids": [sample.token_ids[: sample.prompt_length].tolist() for sample in samples_N],
            "completion_ids": [sample.response_token_ids.tolist() for sample in samples_N],
            "logprobs": [sample.logprobs.tolist() for sample in samples_N],
        }
        masks_N = [(sample.loss_mask != 0.0) & (not sample.remove_sample) for sample in samples_N]
        if not all(mask.all() for mask in masks_N):
            found["env_mask"] = [mask.astype(int).tolist() for mask in masks_N]
        if self._scores:
            key = self._config.reward.reward_key
            found["rollfeed_reward"] = [sample.get_reward_value(key) for sample in samples_N]
        return found


def _check(trainer: Any, config: RolloutConfig, engine: EngineSettings | None) -> None:
    find_trl("trl", "GRPOTrainer")
    if found := [key for key in _WITHOUT_EFFECT if attrgetter(key)(config)]:
        raise ConfigError(f"{found[0]} has no effect: TRL wants every prompt answered, and weighs them: remove it")
    values_of(trainer, "args", "state", "model", "processing_class", "accelerator", "train_dataset", "eval_dataset")
    for name in ("tools", "environment_factories"):
        if getattr(trainer, name, None):
            raise ConfigError(
                f"the trainer's {name}: TRL answers for them by itself: remove them, and give rollfeed tools or an "
                "environment of several turns"
            )
    num_processes = trainer.accelerator.num_processes
    if num_processes > 1 and engine is not None and not engine.is_embedded:
        raise ConfigError(
            f"{num_processes} processes train, and each would give the servers weights: train in one, or leave engine "
            "out, which gives each its embedded one"
        )


def _once(asked: Sequence[Any], num_answers: int) -> list[Any]:
    """Return each prompt once that stands there ``num_answers`` times in a row."""
    chosen = []
    for prompt, alike in groupby(asked):
        num_groups, rest = divmod(len(list(alike)), num_answers)
        if rest:
            raise ConfigError(
                f"a prompt of the {len(asked)} of this process stands there {rest} times, no multiple of "
                f"num_generations = {num_answers}: make one of what is answered at once, "
                "per_device_train_batch_size * steps_per_generation or per_device_eval_batch_size"
            )
        chosen += [prompt] * num_groups
    return chosen


def _only_sample(rollout: Rollout) -> Sample:
    if rollout.error is not None:
        raise RunFailedError(f"{rollout.error}; TRL needs an answer to every prompt")
    if len(rollout.samples) != 1 or not rollout.response_tokens:
        raise RunFailedError(
            f"rollout {rollout.rollout_id} has {len(rollout.samples)} sequences and {rollout.response_tokens} tokens; "
            "TRL takes one sequence that has some: see rollout.rewritten_turns and engine.context_length"
        )
    return rollout.samples[0]


rollout_func = RolloutFunc()
"""Answers with the embedded engine; TRL's configuration says how, and its reward functions score."""
