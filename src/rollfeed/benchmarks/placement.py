"""What starting long answers first, and giving them rounds of their own, is worth in step-synchronous runs.

The same prompts come every epoch, so that the lengths of their answers can be learned; engines have fewer slots than a
batch has responses, so that there is an order to choose.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rollfeed.app import open_rollouts
from rollfeed.benchmarks.schedule_workload import QuickTokenizer
from rollfeed.config import PlacementSettings, PluginSettings, RolloutConfig, RolloutSettings, SamplingSettings
from rollfeed.config.engine import SGLangSettings
from rollfeed.engine.sglang import SGLangEngine
from rollfeed.testing import ListSource
from rollfeed.testing.fake_sglang import (
    FakeMode,
    FakeSettings,
    TimeModelSettings,
    bound_tokens_per_second,
    start_fake_sglang,
)
from rollfeed.types import Sample

PLACEMENTS = {
    "none": PlacementSettings(),
    "long_first": PlacementSettings(long_first=True),
    "tail_batching": PlacementSettings(tail_batching=True),
    "both": PlacementSettings(long_first=True, tail_batching=True),
}
_PROMPT_CHARACTERS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementWorkload:
    """Prompts, engines and lengths."""

    num_prompts: int = 64
    learning_epochs: int = 2
    measured_epochs: int = 5
    rollout_batch_size: int = 16
    n_samples_per_prompt: int = 8
    num_engines: int = 4
    num_slots: int = 16
    """Of one engine."""
    median_length: float = 100.0
    sigma_between: float = 0.8
    sigma_within: float = 0.3
    """Long prompts are long every time: this is what can be learned."""
    max_length: int = 819
    seed: int = 0

    @property
    def time_model(self) -> TimeModelSettings:
        """One engine."""
        return TimeModelSettings(
            num_slots=self.num_slots,
            median_length=self.median_length,
            sigma_between=self.sigma_between,
            sigma_within=self.sigma_within,
            max_length=self.max_length,
            prefill_us_per_token=1.0,
            seed=self.seed,
        )


def bench_placement(workload: PlacementWorkload, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the workload under each placement and return JSON values."""
    results = {}
    for name, placement in PLACEMENTS.items():
        results[name] = asyncio.run(_measure(workload, placement))
        progress(f"{name}: {results[name]['efficiency']:.3f} of the bound")
    return {
        **results,
        "speedup": {name: result["efficiency"] / results["none"]["efficiency"] for name, result in results.items()},
        "workload": asdict(workload),
        "seed": workload.seed,
    }


async def _measure(workload: PlacementWorkload, placement: PlacementSettings) -> dict[str, Any]:
    texts = [f"Question {number}: ".ljust(_PROMPT_CHARACTERS, "x") for number in range(workload.num_prompts)]
    settings = FakeSettings(
        mode=FakeMode.TIME_MODEL, num_workers=workload.num_engines, time_model=workload.time_model, keep_requests=0
    )
    batch_size = workload.rollout_batch_size
    steps_of_epoch = workload.num_prompts // batch_size
    config = RolloutConfig(
        seed=workload.seed,
        rollout=RolloutSettings(
            rollout_batch_size=batch_size,
            n_samples_per_prompt=workload.n_samples_per_prompt,
            max_requests_in_flight=2 * batch_size * workload.n_samples_per_prompt,
        ),
        plugins=PluginSettings(reward=_no_reward),
        sampling=SamplingSettings(rollout_max_response_len=workload.max_length),
        placement=placement,
    )
    async with start_fake_sglang(settings) as fakes:
        engine = SGLangEngine(
            SGLangSettings(workers=fakes.addresses, concurrency=2 * workload.num_engines * workload.num_slots),
            context_length=2 * workload.max_length,
            tokenizer=QuickTokenizer(),
        )
        source = ListSource(texts, repeat=True)
        async with open_rollouts(config, source=source, engine=engine, tokenizer=QuickTokenizer()) as rollouts:
            for _ in range(workload.learning_epochs * steps_of_epoch):
                await rollouts.generate_batch()
            step_seconds, num_tokens = [], 0
            for _ in range(workload.measured_epochs * steps_of_epoch):
                started = time.monotonic()
                batch = await rollouts.generate_batch()
                step_seconds.append(round(time.monotonic() - started, 3))
                num_tokens += sum(sample.response_length for sample in batch.samples)
    bound = workload.num_engines * bound_tokens_per_second(workload.time_model)
    return {
        "efficiency": num_tokens / sum(step_seconds) / bound,
        "tokens": num_tokens,
        "step_seconds": step_seconds,
    }


async def _no_reward(sample: Sample, prompt: Any) -> float:
    del sample, prompt
    return 0.0
