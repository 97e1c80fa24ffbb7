"""Problems made and verified in workers, environment by environment, and draws beside one whose generator hangs."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from rollfeed.app.environments.task_makers import ChosenEnvironment, MakingPlan
from rollfeed.app.sources import build_source
from rollfeed.base.cores import num_cores
from rollfeed.config import Settings
from rollfeed.environments import EnvironmentRegistry
from rollfeed.environments.making import PooledTaskMaker, TaskFailedError, TaskMaker
from rollfeed.environments.verifying import verifier_path
from rollfeed.errors import WorkerError
from rollfeed.protocols import Task
from rollfeed.testing import CharTokenizer
from rollfeed.workers import WorkerPool

GOALS = {"core": 2_000.0, "rlve": 500.0}
"""Tasks a second and core, the median over the environments of a namespace."""
_SLOW = 50.0
"""Tasks a second and core, below which an environment is listed."""
_VERIFIED_AT_ONCE = 64
_WARM_UP = 32
"""Problems of each level that are not measured."""
_HANGING = "rollfeed.benchmarks.environments.hanging:Hanging"
_BETWEEN_DRAWS_SECONDS = 0.01
_BESIDE = ("core/add_numbers", "core/copy_text", "core/sort_numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class MakingWorkload:
    """Environments and levels to measure, and for how long."""

    namespaces: tuple[str, ...] = ("core", "rlve")
    """Or beginnings of ids."""
    levels: tuple[int, ...] = (0, 4)
    seconds: float = 1.0
    """For each environment and level."""
    draws: int = 2_000
    """From a mixture in which a generator hangs."""
    deadline_seconds: float = 2.0
    """For a problem."""
    seed: int = 0


def bench_environments(workload: MakingWorkload, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure and return JSON values."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for namespace in workload.namespaces:
        ids = [each for each in EnvironmentRegistry().ids() if each.startswith(namespace)]
        if not ids:
            progress(f"{namespace}: none is installed")
        else:
            rows[namespace] = asyncio.run(_rates(ids, workload, progress))
    draws = asyncio.run(_draws(_draw_source(workload), workload.draws))
    progress(f"draws beside a generator that hangs: p99 {draws['p99_ms']:.1f} ms, longest {draws['longest_ms']:.0f} ms")
    return {
        "workload": asdict(workload),
        "cores": num_cores(),
        **{namespace: _summary(found, namespace) for namespace, found in rows.items() if found},
        "draws_while_a_generator_hangs": draws,
    }


async def _rates(ids: list[str], workload: MakingWorkload, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    async with WorkerPool(num_workers=num_cores()) as pool:
        plan = MakingPlan(workers=pool, timeout_seconds=workload.deadline_seconds)
        known = [made.facts for made in plan.make([ChosenEnvironment(each, {}) for each in ids], seed=workload.seed)]
        turns = asyncio.Semaphore(max(1, pool.num_workers // 2))
        for facts in known:
            # In workers, those too that a run makes at once.
            maker = PooledTaskMaker(
                facts, run_seed=workload.seed, workers=pool, turns=turns, deadline_seconds=workload.deadline_seconds
            )
            async with maker:
                for level in workload.levels:
                    if facts.max_level is None or level <= facts.max_level:
                        rows.append(await _rate(maker, level, pool, workload.seconds))
                        progress(
                            f"{rows[-1]['environment']}: {rows[-1]['tasks_per_second_per_core']:.0f} tasks/s a core"
                        )
    return rows


async def _rate(maker: TaskMaker, level: int, pool: WorkerPool, seconds: float) -> dict[str, Any]:
    """Make problem after problem, and have each verified meanwhile, for a time."""
    failures: list[str] = []
    path, turns = verifier_path(maker.facts.environment_id), asyncio.Semaphore(_VERIFIED_AT_ONCE)

    async def verify(task: Task) -> None:
        try:
            problem = {"version": task.version, "params": task.params}
            await pool.call(path, [problem, task.answer or "?"], deadline_seconds=5.0)
        except WorkerError as error:
            failures.append(f"verify: {error}")
        finally:
            turns.release()

    await _warm_up(maker, level, pool, path)
    calls, started, index, num_failed = pool.counts.calls, time.perf_counter(), _WARM_UP, 0
    async with asyncio.TaskGroup() as verifying:
        while time.perf_counter() < started + seconds:
            try:
                task = await maker.make(level=level, index=index)
            except TaskFailedError as error:
                failures.append(f"make: {error}")
                num_failed += 1
            else:
                await turns.acquire()
                verifying.create_task(verify(task))
            index += 1
    elapsed, num_made = time.perf_counter() - started, index - _WARM_UP - num_failed
    num_messages = pool.counts.calls - calls - num_made
    return {
        "environment": f"{maker.facts.environment_id}@{level}",
        "tasks_per_second_per_core": num_made / elapsed / num_cores(),
        "tasks_per_message": num_made / max(num_messages, 1),
        "failures": len(failures),
        "first_failure": next(iter(failures), None),
    }


async def _warm_up(maker: TaskMaker, level: int, pool: WorkerPool, path: str) -> None:
    """Have every worker import what it needs, whichever of them is asked."""
    for index in range(_WARM_UP):
        with suppress(TaskFailedError):
            await maker.make(level=level, index=index)
        calls = [pool.call(path, [{"version": None, "params": {}}, "?"], deadline_seconds=5.0) for _ in range(3)]
        await asyncio.gather(*calls, return_exceptions=True)


def _summary(rows: list[dict[str, Any]], namespace: str) -> dict[str, Any]:
    rates = [row["tasks_per_second_per_core"] for row in rows]
    goal = GOALS.get(namespace)
    return {
        "tasks_per_second_per_core": median(rates),
        "tasks_per_message": median(row["tasks_per_message"] for row in rows),
        "lowest": min(rates),
        "goal": goal,
        "met": None if goal is None else median(rates) >= goal,
        "slow": [row for row in rows if row["tasks_per_second_per_core"] < _SLOW],
        "failed": [row for row in rows if row["failures"]],
        "by_environment": {row["environment"]: row["tasks_per_second_per_core"] for row in rows},
    }


def _draw_source(workload: MakingWorkload) -> Any:
    chosen = [{"id": each, "level": 1} for each in _BESIDE]
    settings = Settings.model_validate(
        {
            "seed": workload.seed,
            "prompts": {
                "environments": [*chosen, {"id": _HANGING, "level": 3}],
                "make_timeout_seconds": workload.deadline_seconds,
            },
        }
    )
    return build_source(settings, CharTokenizer())


async def _draws(source: Any, count: int) -> dict[str, Any]:
    """Draw prompt after prompt, a hundred a second, and measure how long each takes and how late the event loop is."""
    late, took = [0.0], []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            late.append(time.perf_counter() - before - 0.005)

    async with source:
        ticking = asyncio.create_task(tick())
        for _ in range(count):
            started = time.perf_counter()
            await source.draw(1)
            took.append(time.perf_counter() - started)
            await asyncio.sleep(_BETWEEN_DRAWS_SECONDS)
        ticking.cancel()
    cuts = quantiles(took, n=100)
    figures = {"p50_ms": cuts[49], "p99_ms": cuts[98], "longest_ms": max(took), "event_loop_late_ms": max(late)}
    return {
        "draws": count,
        **{name: 1e3 * seconds for name, seconds in figures.items()},
        "waited_seconds": math.fsum(took),
        "killed": sum(value for name, value in source.metrics().items() if name.endswith("/timed_out")),
    }
