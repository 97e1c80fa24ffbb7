"""Compares a scheduler with what its engines could do at most, and orders of prompts with each other.

A whole run (ledger, reward, filter, store) over HTTP against fake servers in a process of their own, which answer when
continuous-batching engines would be done. The bound follows from the parameters of the fakes alone: all slots full
all the time.

Orders of prompts, as ``[placement]`` has them, are compared in step-synchronous runs. The same prompts come every
epoch, so that the lengths of their answers can be learned; engines have fewer slots than a batch has responses, so
that there is an order to choose.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from rollfeed.app import open_rollouts
from rollfeed.benchmarks.schedule_figures import CommitLog, MeasuredWindow, RecordingEngine, Snapshot, figures
from rollfeed.benchmarks.schedule_workload import NumberedPrompts, QuickTokenizer, ScheduleMode, ScheduleWorkload
from rollfeed.config import PlacementSettings, PluginSettings, RolloutConfig, RolloutSettings, SamplingSettings
from rollfeed.config.engine import SGLangSettings, WeightUpdateMode
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.errors import RollfeedError
from rollfeed.pipeline import Rollouts
from rollfeed.store import RunDirectory
from rollfeed.testing import ListSource
from rollfeed.testing.fake_sglang import (
    FakeMode,
    Fakes,
    FakeSettings,
    TimeModelSettings,
    bound_tokens_per_second,
    start_fake_sglang,
)
from rollfeed.types import FolderUpdate, Sample, StepCommit, TrainBatch

DEFAULT_STEPS = {ScheduleMode.SYNC: 5, ScheduleMode.OVERSAMPLE: 5, ScheduleMode.PARTIAL: 64, ScheduleMode.ASYNC: 64}
GOALS = {
    "async_efficiency": 0.95,
    "partial_efficiency": 0.88,
    "efficiency_of_possible_half_filtered": 0.93,
    "length_bias": 0.02,
}
_NUM_WARM_UP_STEPS = 4
"""The window begins when these batches are delivered; in a run of no more than one further step, with the first one."""
_MOST_DRAINING_STEPS = 64
"""Within which the prompts of the window must be decided."""


def bench_schedule(workload: ScheduleWorkload, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the workload and return JSON values.

    Raises:
        ConfigError: If the settings do not fit together.
        RollfeedError: If the run fails.
    """
    return asyncio.run(_bench(workload, progress))


class _ScheduleRun(NamedTuple):
    rollouts: Rollouts
    engine: RecordingEngine
    source: NumberedPrompts
    log: CommitLog
    fakes: Fakes
    folder: Path


async def _bench(workload: ScheduleWorkload, progress: Callable[[str], None]) -> dict[str, Any]:
    began = time.monotonic()
    async with _open(workload) as run:
        window, step_seconds = await _measure(run, workload, progress)
        num_draining = await _drain(run, workload, window, progress)
    return {
        **figures(workload, window, run.engine, run.log),
        "groups_in_flight": workload.groups_in_flight,
        "step_seconds": step_seconds,
        "draining_steps": num_draining,
        "wall_seconds": time.monotonic() - began,
        "workload": asdict(workload),
        "seed": workload.seed,
        "goals": GOALS,
    }


@asynccontextmanager
async def _open(workload: ScheduleWorkload) -> AsyncIterator[_ScheduleRun]:
    log = CommitLog()
    source = NumberedPrompts(prompt_tokens=workload.prompt_tokens, seed=workload.seed)
    config = workload.rollout_config()
    with (
        tempfile.TemporaryDirectory(prefix="rollfeed-bench-") as name,
        RunDirectory.open(Path(name, "run"), settings={}, identity={}, overwrite=False) as directory,
    ):

        def commit(step: StepCommit) -> None:
            directory.commit(step, reward_key=None)
            log.add(step)

        async with start_fake_sglang(workload.fake_settings) as fakes:
            engine = RecordingEngine(
                SGLang(
                    SGLangSettings(
                        workers=fakes.addresses,
                        concurrency=workload.requests_at_servers,
                        # Which server has how many varies: with one a request, some would be closed and made again.
                        max_connections=2 * workload.requests_at_servers,
                        weight_update=WeightUpdateMode.IN_PLACE,
                    )
                ),
                context_length=workload.context_length,
                tokenizer=QuickTokenizer(),
                prompt_tokens=workload.prompt_tokens,
            )
            async with open_rollouts(
                config, source=source, engine=engine, tokenizer=QuickTokenizer(), commit=commit, turns=directory.turns
            ) as rollouts:
                yield _ScheduleRun(rollouts, engine, source, log, fakes, Path(name))


async def _measure(
    run: _ScheduleRun, workload: ScheduleWorkload, progress: Callable[[str], None]
) -> tuple[MeasuredWindow, list[float]]:
    num_before = _NUM_WARM_UP_STEPS if workload.num_steps > _NUM_WARM_UP_STEPS + 1 else 0
    began = await _snapshot(run.fakes)
    step_seconds: list[float] = []
    for step in range(workload.num_steps):
        started = time.monotonic()
        batch = await run.rollouts.generate_batch()
        step_seconds.append(round(time.monotonic() - started, 3))
        progress(f"batch {step + 1} of {workload.num_steps}: {_told(batch, step_seconds[-1])}")
        if step + 1 == workload.num_steps:
            break
        if step + 1 == num_before:
            began = await _snapshot(run.fakes)
        await _publish(run, workload)
    ended = await _snapshot(run.fakes)
    window = MeasuredWindow(
        first_step=num_before,
        last_step=workload.num_steps - 1,
        began=began,
        ended=ended,
        num_drawn=run.source.num_drawn,
    )
    return window, step_seconds


async def _drain(
    run: _ScheduleRun, workload: ScheduleWorkload, window: MeasuredWindow, progress: Callable[[str], None]
) -> int:
    """Go on until everything drawn in the window is decided; return how many steps that took."""
    keys = frozenset(run.source.prompt(number).token_ids.tobytes() for number in range(window.num_drawn))
    for step in range(_MOST_DRAINING_STEPS):
        num_left = len(keys & run.log.pending)
        if not num_left:
            return step
        await _publish(run, workload)
        batch = await run.rollouts.generate_batch()
        progress(f"{num_left} prompts undecided: a further batch of {len(batch.samples)} samples")
    raise RollfeedError(
        f"{len(keys & run.log.pending)} prompts are undecided {_MOST_DRAINING_STEPS} steps after the last measured one"
    )


async def _publish(run: _ScheduleRun, workload: ScheduleWorkload) -> None:
    if not workload.weight_updates:
        return
    run.engine.update_times.append(time.monotonic())
    await run.engine.apply(FolderUpdate(run.folder, policy_version=run.engine.policy_version + 1))


async def _snapshot(fakes: Fakes) -> Snapshot:
    stats = await asyncio.gather(*(fakes.stats(address) for address in fakes.addresses))
    return Snapshot(
        # Each server's time as it counted, which is the same clock as here: replies may be late.
        at=mean(each["clock_seconds"] for each in stats),
        generated_tokens=sum(each["generated_tokens"] for each in stats),
        busy_slot_seconds=sum(each["busy_slot_seconds"] for each in stats),
    )


def _told(batch: TrainBatch, seconds: float) -> str:
    num_tokens = sum(sample.response_length for sample in batch.samples)
    return f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.0f} tokens/s"


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
        results[name] = asyncio.run(_measure_placement(workload, placement))
        progress(f"{name}: {results[name]['efficiency']:.3f} of the bound")
    return {
        **results,
        "speedup": {name: result["efficiency"] / results["none"]["efficiency"] for name, result in results.items()},
        "workload": asdict(workload),
        "seed": workload.seed,
    }


async def _measure_placement(workload: PlacementWorkload, placement: PlacementSettings) -> dict[str, Any]:
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
        engine = ServerEngine(
            SGLang(SGLangSettings(workers=fakes.addresses, concurrency=2 * workload.num_engines * workload.num_slots)),
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
    return {"efficiency": num_tokens / sum(step_seconds) / bound, "tokens": num_tokens, "step_seconds": step_seconds}


async def _no_reward(sample: Sample, prompt: Any) -> float:
    del sample, prompt
    return 0.0
