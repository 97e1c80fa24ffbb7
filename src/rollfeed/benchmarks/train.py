"""Steps of training in one process: trainer and embedded engine on a CPU, in float32, on problems of an environment.

Every step is synchronous: 4 prompts of ``core/compare_max`` at level 1 ("which of three two-digit numbers is the
largest") are answered 8 times each at temperature 1, scored, trained on in one update, and the engine gets the new
weights. Nothing is stored.

The passes are compared with how fast their matrix products could be, measured after every step for the tokens that it
computed. Counted are the products of the linear layers and of the head, forward and backward: with N rows in, ``(N, I)
@ (I, O)`` for the outputs, ``(N, O) @ (O, I)`` for the gradient of the inputs and ``(O, N) @ (N, I)`` for that of the
weights, so ``6 * N * I * O`` operations a layer. Not counted are embedding, attention, norms, activations, softmax and
loss. What is measured are plain products of float32 arrays of these shapes by the same library with as many threads.

Axes: N rows, I inputs and O outputs of a layer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollfeed.app import Model, build_engine, environment_source, open_rollouts
from rollfeed.config import EngineSettings, RolloutConfig, RolloutSettings, SamplingSettings
from rollfeed.config.optimizer import OptimizerSettings
from rollfeed.config.train import TrainPrecision, TrainSettings
from rollfeed.errors import CheckpointError
from rollfeed.model_files.products import product
from rollfeed.pipeline import Observers, Rollouts
from rollfeed.protocols import PromptSource, Tokenizer
from rollfeed.training.objective import TrainReport
from rollfeed.training.trainer import Trainer
from rollfeed.types import TrainBatch

ENVIRONMENT = "core/compare_max"
LEVEL = 1
"""Three numbers of two digits."""

_CONTEXT_LENGTH = 256
_REPETITIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWorkload:
    """The size of every step."""

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
        steps = asyncio.run(_TrainRun(model, workload, layers, progress).steps())
    return {
        "workload": {"environment": ENVIRONMENT, "level": LEVEL, **asdict(workload)},
        "model": model.checkpoint.name,
        **_summary(steps),
        "steps": steps,
    }


def _summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    sums = {name: sum(step[name] for step in steps) for name in steps[0] if name != "share_of_bound"}
    shares = [step["share_of_bound"] for step in steps if step["share_of_bound"] is not None]
    parts = ("generation", "scoring", "forward", "backward", "optimizer", "publishing")
    return {
        "step_seconds": median(step["step_seconds"] for step in steps),
        "cpu_time": median(step["cpu_time"] for step in steps),
        "seconds_per_1000_output_tokens": 1000 * sums["step_seconds"] / max(1, sums["output_tokens"]),
        "output_tokens_per_second": sums["output_tokens"] / sums["step_seconds"],
        "trained_tokens_per_second": sums["trained_tokens"] / sums["training_seconds"],
        "share_of_bound": median(shares) if shares else None,
        "parts": {part: sums[f"{part}_seconds"] / sums["step_seconds"] for part in parts},
    }


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _TrainRun:
    """A trainer and an engine that go on from step to step."""

    def __init__(
        self, model: Model, workload: TrainWorkload, layers: LinearLayers, progress: Callable[[str], None]
    ) -> None:
        self._model = model
        self._workload = workload
        self._layers = layers
        self._progress = progress
        self._answered_at = 0.0
        """When the latest response has ended, by the performance counter."""
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

    async def steps(self) -> list[dict[str, Any]]:
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
            observers=[Observers(on_rollout=self._note_response)],
        )

    def _note_response(self) -> None:
        self._answered_at = time.perf_counter()

    async def _step(self, rollouts: Rollouts) -> dict[str, Any]:
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
            generation_seconds=self._answered_at - began,
            scoring_seconds=generated - self._answered_at,
            training_seconds=trained - generated,
            publishing_seconds=published - trained,
        )

    def _figures(self, batch: TrainBatch, report: TrainReport, **seconds: float) -> dict[str, Any]:
        """Return where the time of a step went, and for what; ``share_of_bound`` is None where nothing was trained on.

        Generation ends with the last response; most groups are scored meanwhile, and what scoring and advantages add
        to that is ``scoring_seconds``. ``trained_tokens`` are of responses with an advantage, which alone have a
        gradient; ``computed_tokens`` went through the model for them, prompts once a group, padding left out.
        """
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
        return {
            **seconds,
            **{f"{part}_seconds": taken for part, taken in report.part_seconds.items()},
            "output_tokens": int(batch.metrics["rollout/generated_tokens"]),
            "mean_response_length": float(np.mean([sample.response_length for sample in batch.samples])),
            "truncated_ratio": batch.metrics["rollout/truncated_ratio"],
            "reward_mean": batch.metrics["rollout/reward_mean"],
            "trained_tokens": trained_tokens,
            "computed_tokens": computed_tokens,
            "padded_tokens": metrics["padded_tokens"],
            "bound_seconds": bound_seconds,
            "bound_operations": num_micro_batches * product_operations(self._layers, **rows),
            "share_of_bound": bound_seconds / passes if computed_tokens else None,
        }


def _line(name: str, step: dict[str, Any]) -> str:
    share = step["share_of_bound"]
    return (
        f"{name}: {step['step_seconds']:.1f} s ({step['generation_seconds']:.1f} generation, "
        f"{step['scoring_seconds']:.2f} scoring, {step['training_seconds']:.1f} training, "
        f"{step['publishing_seconds']:.2f} publishing), {step['output_tokens']} tokens, "
        f"{'nothing to train on' if share is None else f'{share:.0%} of the bound'}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayers:
    """The shapes ``(O, I)`` of a model's matrices."""

    inner: Counter[tuple[int, int]]
    """How often each is there; every token goes through all of them."""
    head: tuple[int, int]
    """Only places whose logits are needed go through it."""

    def shapes(self, *, num_tokens: int, num_logits: int) -> Iterator[tuple[tuple[int, int], int, int]]:
        """Return shape, number of layers and rows of each."""
        for shape, count in self.inner.items():
            yield shape, count, num_tokens
        yield self.head, 1, num_logits


def linear_layers(checkpoint: Path) -> LinearLayers:
    """Return the matrices of a model by its configuration; no weight is read.

    Raises:
        CheckpointError: If it has no linear layers, or none that makes logits.
    """
    config = AutoConfig.from_pretrained(str(checkpoint), local_files_only=True)
    automatic: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: Any = automatic.from_config(config)
    head = model.get_output_embeddings()
    inner: Counter[tuple[int, int]] = Counter()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if (
            module is not head
            and not isinstance(module, torch.nn.Embedding)
            and weight is not None
            and weight.ndim == 2
        ):
            inner[_shape(weight)] += 1
    if head is None or not inner:
        raise CheckpointError(f"{checkpoint}: its linear layers are not known, so there is nothing to compare with")
    return LinearLayers(inner=inner, head=_shape(head.weight))


def product_seconds(layers: LinearLayers, *, num_tokens: int, num_logits: int) -> float:
    """Return how long all products of one forward and backward pass take.

    Each shape is measured by itself, the median of three after a first, and taken as often as the model has it.

    Inner layers have ``num_tokens`` rows, the head ``num_logits``.
    """
    shapes = layers.shapes(num_tokens=num_tokens, num_logits=num_logits)
    return sum(count * _seconds(shape, num_rows) for shape, count, num_rows in shapes)


def product_operations(layers: LinearLayers, *, num_tokens: int, num_logits: int) -> int:
    """Return the multiplications and additions of these products."""
    shapes = layers.shapes(num_tokens=num_tokens, num_logits=num_logits)
    return sum(6 * count * num_rows * shape[0] * shape[1] for shape, count, num_rows in shapes)


def _shape(weight: torch.Tensor) -> tuple[int, int]:
    return int(weight.shape[0]), int(weight.shape[1])


def _seconds(shape: tuple[int, int], num_rows: int) -> float:
    num_outputs, num_inputs = shape
    inputs_NI, gradient_NO = torch.rand(num_rows, num_inputs), torch.rand(num_rows, num_outputs)
    weight_OI = torch.rand(num_outputs, num_inputs)
    times = []
    for _ in range(1 + _REPETITIONS):
        started = time.perf_counter()
        product(inputs_NI, weight_OI.t())
        product(gradient_NO, weight_OI)
        product(gradient_NO.t(), inputs_NI)
        times.append(time.perf_counter() - started)
    return median(times[1:])
