"""The rollout worker and the weight transfer of TRL's ``AsyncGRPOTrainer``: asynchronous rollouts in its process.

Batches are made while the trainer trains; the next one is cut when all samples of the one before have been taken.
"""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollfeed.app.build import load_functions, open_rollouts
from rollfeed.app.inside_trl.data_rows import load_rows
from rollfeed.app.inside_trl.trainer_settings import as_config, default_engine, find_trl, values_of
from rollfeed.app.inside_trl.trl_rewards import SUM, TrlRewards
from rollfeed.app.model import build_engine, load_model
from rollfeed.base.loop_thread import LoopThread
from rollfeed.config import EngineSettings, RolloutConfig, RolloutMode
from rollfeed.config.model import ModelSettings
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.pipeline import Observers, Rollouts
from rollfeed.prompts import ColumnKeys, DatasetSource
from rollfeed.types import Group, Sample, TrainBatch

_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "weight_sync_steps")
"""Their product are the samples that are taken between two updates of the engine."""


class AsyncRollouts:
    """Makes the samples of an ``AsyncGRPOTrainer`` and takes its weights; give it as both.

    ``AsyncGRPOTrainer(..., rollout_worker=rollouts, weight_transfer=rollouts)``. It may be trained with once.

    Args:
        model: As the trainer gets it: a folder, or a name of the hub.
        args: The trainer's ``AsyncGRPOConfig``.
        train_dataset: The trainer's.
        reward_funcs: Functions as TRL has them, summed, called in this process; the trainer does not call its own.
            Without them ``config`` scores.
        config: As of :class:`rollfeed.compat.trl.RolloutFunc`, with filters and advantages.
        engine: As there, and so are ``label_key`` and ``metadata_key``.
        label_key: As there.
        metadata_key: As there.

    Raises:
        ConfigError: If a setting is TRL's to say, or cannot be had with this trainer, or a row cannot be used.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        args: Any,
        train_dataset: Any,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
        config: RolloutConfig | None = None,
        engine: EngineSettings | None = None,
        label_key: str | None = None,
        metadata_key: str | None = None,
    ) -> None:
        self._sample_class = find_trl("trl.experimental.async_grpo.async_rollout_worker", "RolloutSample")
        arguments, device = values_of(args, "chat_template_kwargs", "device")
        loaded_model = load_model(
            str(model),
            ModelSettings(chat_template_kwargs=arguments or {}),
            with_weights=engine is None or engine.needs_weights,
        )
        functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        rewards = TrlRewards(functions, train_dataset, loaded_model.tokenizer) if functions else None
        self._config = made = _config_of(config or RolloutConfig(), args, rewards)
        loaded = load_rows(
            train_dataset,
            name="train_dataset",
            tokenizer=loaded_model.tokenizer,
            made=load_functions(made),
            keys=ColumnKeys(label_key=label_key, metadata_key=metadata_key),
            config=made,
        )
        longest = max(len(prompt.token_ids) for prompt in loaded.prompts)
        engine = engine or default_engine(device, context_length=longest + made.sampling.rollout_max_response_len)
        self._rollouts: Rollouts = open_rollouts(
            made,
            source=DatasetSource(loaded, seed=made.seed),
            engine=build_engine(loaded_model, engine),
            tokenizer=loaded_model.tokenizer,
            observers=[Observers(on_rollout=self._saw)],
        )
        self.rollout_buffer: queue.Queue[Any] = _SampleQueue(self._emptied)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._is_empty = asyncio.Event()
        self._loop: LoopThread | None = None
        self._making: asyncio.Task[None] | None = None
        self._version = self._ahead = 0
        self._seen = time.monotonic()

    def init_weight_transfer(self) -> None:
        self._loop = LoopThread("rollfeed-trl", self._rollouts.__aenter__())

    def pause(self) -> None:
        """Do nothing: the engine holds its requests, or goes on with them, as it takes the weights."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        assert self._loop is not None
        self._version += 1
        self._loop.call(self._rollouts.update_weights(dict(iterator), policy_version=self._version))

    def resume(self) -> None:
        """Do nothing, as :meth:`pause`."""

    def start(self) -> None:
        if self._loop is None:
            raise ConfigError("AsyncRollouts is the rollout_worker alone: give it as weight_transfer, too")
        self._saw()
        self._loop.call(self._begin())

    def update_model_version(self, model_version: int) -> None:
        """Take the trainer's number for the weights that came last."""
        self._ahead = model_version - self._version
        self._saw()

    def check_health(self, stale_after_s: float) -> None:
        """Say why no sample comes.

        Raises:
            RunFailedError: If nothing makes samples any more, or no rollout has ended for ``stale_after_s`` seconds.
        """
        if self._making is not None and self._making.done():
            error = None if self._making.cancelled() else self._making.exception()
            raise RunFailedError(f"no more samples: {error or 'the rollouts were stopped'}") from error
        if (quiet := time.monotonic() - self._seen) > stale_after_s:
            raise RunFailedError(f"no rollout has ended for {quiet:.0f} s: see heartbeat_stale_after_s, and the engine")

    def stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            try:
                loop.call(self._end())
            finally:
                loop.close()

    def destroy(self) -> None:
        self.stop()

    def _saw(self) -> None:
        self._seen = time.monotonic()

    def _emptied(self) -> None:
        if (loop := self._loop) is not None:
            loop.loop.call_soon_threadsafe(self._is_empty.set)

    async def _begin(self) -> None:
        self._making = asyncio.create_task(self._make_batches())

    async def _end(self) -> None:
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)
        await self._rollouts.__aexit__()

    async def _make_batches(self) -> None:
        while True:
            batch = await self._rollouts.generate_batch()
            self.metrics_queue.put(dict(batch.metrics))
            for sample in list(self._samples(batch)):
                self.rollout_buffer.put(sample)
            self._is_empty.clear()
            # A trainer that waits may take the first ones, and empty the queue, before the last is in it.
            while not self.rollout_buffer.empty():
                await self._is_empty.wait()
                self._is_empty.clear()
            self._saw()

    def _samples(self, batch: TrainBatch) -> Iterable[Any]:
        """Yield the samples of a batch that are trained on, as TRL has them."""
        if isinstance(batch.advantages_S, tuple):
            raise RunFailedError("TRL takes an advantage a sample, and these are one a token: set another [advantage]")
        groups = {group.group_index: group for group in batch.groups}
        for sample, advantage in zip(batch.samples, batch.advantages_S.tolist(), strict=True):
            if sample.loss_mask.any() and not sample.remove_sample:
                yield self._as_trl(sample, advantage, groups[sample.group_index])

    def _as_trl(self, sample: Sample, advantage: float, group: Group) -> Any:
        key, prompt, context = self._config.reward.reward_key, group.prompt, np.zeros(sample.prompt_length)
        named = sample.reward if isinstance(sample.reward, dict) else {}
        return self._sample_class(
            prompt=prompt.text if prompt.messages is None else list(prompt.messages),
            completion=sample.response
            if prompt.messages is None
            else [{"role": "assistant", "content": sample.response}],
            input_ids=sample.token_ids.astype(np.int64),
            completion_mask=np.concatenate([context, sample.loss_mask != 0.0]).astype(np.int64),
            old_log_probs=np.concatenate([context, sample.logprobs]).astype(np.float32),
            advantage=advantage,
            model_version=(sample.oldest_trained_version or 0) + self._ahead,
            group_id=group.group_index,
            metrics={
                "reward": sample.get_reward_value(key),
                "reward_std": float(group.reward_values(key).std()),
                **{f"rewards/{name}": float(value) for name, value in named.items() if name != key},
            },
            enqueued_at=time.time(),
        )


class _SampleQueue(queue.Queue[Any]):
    """Tells when its last sample is taken."""

    def __init__(self, emptied: Callable[[], None]) -> None:
        super().__init__()
        self._emptied = emptied

    def _get(self) -> Any:
        sample = super()._get()
        if not self._qsize():
            self._emptied()
        return sample


def _config_of(config: RolloutConfig, args: Any, rewards: TrlRewards | None) -> RolloutConfig:
    num_samples = math.prod(values_of(args, *_SIZES))
    num_generations, in_flight, max_staleness = values_of(
        args, "num_generations", "max_inflight_tasks", "max_staleness"
    )
    num_groups, rest = divmod(num_samples, num_generations)
    if rest:
        raise ConfigError(
            f"{' * '.join(_SIZES)} = {num_samples} is no multiple of num_generations = {num_generations}: change one"
        )
    made = as_config(
        config,
        args,
        mode=RolloutMode.ASYNC,
        rollout_batch_size=num_groups,
        max_requests_in_flight=in_flight if in_flight > 0 else config.rollout.max_requests_in_flight,
        # The trainer may take the last of a batch a version after it was cut.
        max_staleness=max(0, max_staleness - 1),
    )
    proof = made.weights.proof.model_copy(update={"num_texts": 0})  # nobody says what the weights should say
    changed: dict[str, Any] = {"weights": made.weights.model_copy(update={"proof": proof})}
    if "advantage" not in config.model_fields_set and config.plugins.advantage is None:
        changed["advantage"] = made.advantage.model_copy(update={"divide_by_std": True})  # as TRL does
    if rewards is not None:
        if config.plugins.has_reward or config.reward.rm_type:
            raise ConfigError("reward_funcs and rollfeed's config both score: leave one of them out")
        changed["plugins"] = made.plugins.model_copy(update={"batched_reward": rewards})
        changed["reward"] = made.reward.model_copy(update={"reward_key": SUM})
    return made.model_copy(update=changed)
