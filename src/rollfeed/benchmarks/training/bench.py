"""Steps of training in one process: trainer and embedded engine on a CPU, in float32, on problems of an environment.

Every step is synchronous: 4 prompts of ``core/compare_max`` at level 1 ("which of three two-digit numbers is the
largest") are answered 8 times each at temperature 1, scored, trained on in one update, and the engine gets the new
weights. Nothing is stored. The passes are compared with the bound of :mod:`rollfeed.benchmarks.training.bound`, which
is measured after every step for the tokens that it computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from rollfeed.app import Model, build_engine, environment_source, open_rollouts
from rollfeed.benchmarks.training.bound import LinearLayers, linear_layers, product_operations, product_seconds
from rollfeed.config import EngineSettings, RolloutConfig, RolloutSettings, SamplingSettings
from rollfeed.config.train import OptimizerSettings, TrainPrecision, TrainSettings
from rollfeed.pipeline import Rollouts
from rollfeed.protocols import PromptSource, Tokenizer
from rollfeed.training.trainer import Trainer, TrainReport
from rollfeed.types import Group, Rollout, StepCommit, TrainBatch

ENVIRONMENT = "core/compare_max"
LEVEL = 1
"""Three numbers of two digits."""

_CONTEXT_LENGTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWorkload:
    """What every step does."""

    num_steps: int = 3
    num_warmup_steps: int = 1
    """Made first and not measured."""
    rollout_batch_size: int = 4
    n_samples_per_prompt: int = 8
    max_new_tokens: int = 64
    temperature: float = 1.0
    learning_rate: float = 1e-6
    threads: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Where the time of one step went; the five parts add up to ``step_seconds``."""

    step_seconds: float
    cpu_time: float
    """Seconds that all threads of the process computed in the step: what a busy machine changes least."""
    generation_seconds: float
    """Until the last response has ended; most groups are scored meanwhile."""
    scoring_seconds: float
    """From there to the batch: what scoring and advantages add."""
    training_seconds: float
    """Of the trainer: the three below, and packing."""
    publishing_seconds: float
    """Until the engine has the new weights."""
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    output_tokens: int
    """Sampled in this step."""
    mean_response_length: float
    truncated_ratio: float
    reward_mean: float
    trained_tokens: int
    """Of responses with an advantage other than 0: the others have no gradient and are only scored."""
    computed_tokens: int
    """That went through the model with a gradient: prompts once a group, padding left out."""
    padded_tokens: int
    """With padding."""
    bound_seconds: float
    """Of the matrix products for the computed tokens, measured after the step."""
    bound_operations: int
    share_of_bound: float | None
    """``bound_seconds`` over forward and backward; None where nothing was trained on."""


def workload_source(tokenizer: Tokenizer, *, seed: int) -> PromptSource:
    """Return the prompts of the workload, the same for the same seed."""
    return environment_source(ENVIRONMENT, level=LEVEL, seed=seed, tokenizer=tokenizer)


def bench_train(model: Model, *, workload: TrainWorkload, progress: Callable[[str], None]) -> dict[str, Any]:
    """Train and return JSON values; takes about a quarter of a minute a step with the built-in model.

    Raises:
        CheckpointError: If the model cannot be trained.
        RollfeedError: If a step fails.
    """
    layers = linear_layers(model.checkpoint)
    with _torch_threads(workload.threads):
        steps = asyncio.run(_Run(model, workload, layers, progress).steps())
    return {
        "workload": {"environment": ENVIRONMENT, "level": LEVEL, **asdict(workload)},
        "model": model.checkpoint.name,
        **_summary(steps),
        "steps": [asdict(step) for step in steps],
    }


def _summary(steps: list[StepFigures]) -> dict[str, Any]:
    step_seconds = sum(step.step_seconds for step in steps)
    output_tokens = sum(step.output_tokens for step in steps)
    training_seconds = sum(step.training_seconds for step in steps)
    shares = [step.share_of_bound for step in steps if step.share_of_bound is not None]
    parts = ("generation", "scoring", "forward", "backward", "optimizer", "publishing")
    return {
        "step_seconds": median(step.step_seconds for step in steps),
        "cpu_time": median(step.cpu_time for step in steps),
        "seconds_per_1000_output_tokens": 1000 * step_seconds / max(1, output_tokens),
        "output_tokens_per_second": output_tokens / step_seconds,
        "trained_tokens_per_second": sum(step.trained_tokens for step in steps) / training_seconds,
        "share_of_bound": median(shares) if shares else None,
        "parts": {part: sum(getattr(step, f"{part}_seconds") for step in steps) / step_seconds for part in parts},
    }


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _LastResponse:
    """An observer that notes when the latest response has ended, by the performance counter."""

    ended_at = 0.0

    def step_started(self, step: int) -> None: ...

    def group_submitted(self, group: Group) -> None: ...

    def rollout_finished(self, rollout: Rollout) -> None:
        self.ended_at = time.perf_counter()

    def group_decided(self, group: Group, decision: object) -> None: ...

    def waiting(self, message: str) -> None: ...

    def step_finished(self, commit: StepCommit) -> None: ...


class _Run:
    """A trainer and an engine that go on from step to step."""

    def __init__(
        self, model: Model, workload: TrainWorkload, layers: LinearLayers, progress: Callable[[str], None]
    ) -> None:
        self._model = model
        self._workload = workload
        self._layers = layers
        self._progress = progress
        self._last_response = _LastResponse()
        self._trainer = Trainer(
            model.checkpoint,
            settings=TrainSettings(
                device="cpu",
                threads=workload.threads,
                precision=TrainPrecision.FP32,
                optimizer=OptimizerSettings(learning_rate=workload.learning_rate),
            ),
            temperature=workload.temperature,
            num_batches=workload.num_warmup_steps + workload.num_steps,
            max_response_length=workload.max_new_tokens,
        )

    async def steps(self) -> list[StepFigures]:
        """Return the figures of the measured steps."""
        workload, figures = self._workload, []
        async with self._open() as rollouts:
            for number in range(workload.num_warmup_steps + workload.num_steps):
                step = await self._step(rollouts)
                is_warmup = number < workload.num_warmup_steps
                self._progress(_line("warm-up" if is_warmup else f"step {number - workload.num_warmup_steps}", step))
                if not is_warmup:
                    figures.append(step)
        return figures

    def _open(self) -> Rollouts:
        workload = self._workload
        num_samples = workload.rollout_batch_size * workload.n_samples_per_prompt
        engine = EngineSettings(num_slots=num_samples, context_length=_CONTEXT_LENGTH, threads=workload.threads)
        return open_rollouts(
            RolloutConfig(
                seed=workload.seed,
                rollout=RolloutSettings(
                    rollout_batch_size=workload.rollout_batch_size, n_samples_per_prompt=workload.n_samples_per_prompt
                ),
                sampling=SamplingSettings(
                    rollout_max_response_len=workload.max_new_tokens, rollout_temperature=workload.temperature
                ),
            ),
            source=workload_source(self._model.tokenizer, seed=workload.seed),
            engine=build_engine(self._model, engine),
            tokenizer=self._model.tokenizer,
            observers=[self._last_response],
        )

    async def _step(self, rollouts: Rollouts) -> StepFigures:
        began, computed_before = time.perf_counter(), time.process_time()
        batch = await rollouts.generate_batch()
        generated = time.perf_counter()
        report = await asyncio.to_thread(self._trainer.train_step, batch)
        trained = time.perf_counter()
        await rollouts.update_weights(self._trainer.weights(), policy_version=self._trainer.step)
        published = time.perf_counter()
        return self._figures(
            batch,
            report,
            step_seconds=published - began,
            cpu_time=time.process_time() - computed_before,
            generation_seconds=self._last_response.ended_at - began,
            scoring_seconds=generated - self._last_response.ended_at,
            training_seconds=trained - generated,
            publishing_seconds=published - trained,
        )

    def _figures(self, batch: TrainBatch, report: TrainReport, **seconds: float) -> StepFigures:
        metrics = {name.rpartition("/")[2]: int(value) for name, value in report.metrics.items() if "tokens" in name}
        trained_tokens = metrics.get("tokens", 0) - metrics.get("zero_advantage_tokens", 0)
        computed_tokens = metrics["computed_tokens"]
        num_micro_batches = max(1, int(report.metrics["train/micro_batches"]))
        rows = {
            "num_tokens": round(computed_tokens / num_micro_batches),
            "num_logits": round(trained_tokens / num_micro_batches),
        }
        bound_seconds = num_micro_batches * product_seconds(self._layers, **rows) if computed_tokens else 0.0
        passes = report.part_seconds["forward"] + report.part_seconds["backward"]
        lengths = [sample.response_length for sample in batch.samples]
        return StepFigures(
            **seconds,
            **{f"{part}_seconds": taken for part, taken in report.part_seconds.items()},
            output_tokens=int(batch.metrics["rollout/generated_tokens"]),
            mean_response_length=float(np.mean(lengths)),
            truncated_ratio=batch.metrics["rollout/truncated_ratio"],
            reward_mean=batch.metrics["rollout/reward_mean"],
            trained_tokens=trained_tokens,
            computed_tokens=computed_tokens,
            padded_tokens=metrics["padded_tokens"],
            bound_seconds=bound_seconds,
            bound_operations=num_micro_batches * product_operations(self._layers, **rows),
            share_of_bound=bound_seconds / passes if computed_tokens else None,
        )


def _line(name: str, step: StepFigures) -> str:
    share = "nothing to train on" if step.share_of_bound is None else f"{step.share_of_bound:.0%} of the bound"
    return (
        f"{name}: {step.step_seconds:.1f} s ({step.generation_seconds:.1f} generation, "
        f"{step.scoring_seconds:.2f} scoring, {step.training_seconds:.1f} training, "
        f"{step.publishing_seconds:.2f} publishing), {step.output_tokens} tokens, {share}"
    )
