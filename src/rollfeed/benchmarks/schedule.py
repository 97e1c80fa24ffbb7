"""How close a scheduler comes to what its engines could do.

A whole run (ledger, reward, filter, store) over HTTP against fake servers in a process of their own, which answer when
continuous-batching engines would be done. The bound follows from the parameters of the fakes alone: all slots full
all the time.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from rollfeed.app import open_rollouts
from rollfeed.benchmarks.schedule_figures import Snapshot, Window, as_json, figures
from rollfeed.benchmarks.schedule_records import CommitLog, RecordingEngine
from rollfeed.benchmarks.schedule_workload import NumberedPrompts, QuickTokenizer, ScheduleMode, ScheduleWorkload
from rollfeed.config.engine import SGLangSettings, WeightUpdateMode
from rollfeed.errors import RollfeedError
from rollfeed.pipeline import Rollouts
from rollfeed.store import RunDirectory
from rollfeed.testing.fake_sglang import Fakes, start_fake_sglang
from rollfeed.types import StepCommit, TrainBatch

DEFAULT_STEPS = {
    ScheduleMode.SYNC: 5,
    ScheduleMode.OVERSAMPLE: 5,
    ScheduleMode.PARTIAL: 64,
    ScheduleMode.ASYNC: 64,
}
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


class _Run(NamedTuple):
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
    result = figures(workload, window, run.engine, run.log)
    return {
        **as_json(result),
        "groups_in_flight": workload.groups_in_flight,
        "step_seconds": step_seconds,
        "draining_steps": num_draining,
        "wall_seconds": time.monotonic() - began,
        "workload": asdict(workload),
        "seed": workload.seed,
        "goals": GOALS,
    }


@asynccontextmanager
async def _open(workload: ScheduleWorkload) -> AsyncIterator[_Run]:
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
                SGLangSettings(
                    workers=fakes.addresses,
                    concurrency=workload.requests_at_servers,
                    # Which server has how many varies: with one a request, connections would be closed and made again.
                    max_connections=2 * workload.requests_at_servers,
                    weight_update=WeightUpdateMode.IN_PLACE,
                ),
                context_length=workload.context_length,
                tokenizer=QuickTokenizer(),
                prompt_tokens=workload.prompt_tokens,
            )
            async with open_rollouts(
                config, source=source, engine=engine, tokenizer=QuickTokenizer(), commit=commit
            ) as rollouts:
                yield _Run(rollouts, engine, source, log, fakes, Path(name))


async def _measure(
    run: _Run, workload: ScheduleWorkload, progress: Callable[[str], None]
) -> tuple[Window, list[float]]:
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
    window = Window(
        first_step=num_before,
        last_step=workload.num_steps - 1,
        began=began,
        ended=ended,
        num_drawn=run.source.num_drawn,
    )
    return window, step_seconds


async def _drain(run: _Run, workload: ScheduleWorkload, window: Window, progress: Callable[[str], None]) -> int:
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


async def _publish(run: _Run, workload: ScheduleWorkload) -> None:
    if not workload.weight_updates:
        return
    run.engine.update_times.append(time.monotonic())
    await run.engine.update_weights_from_disk(run.folder, policy_version=run.engine.policy_version + 1)


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
