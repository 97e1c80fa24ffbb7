from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from rollfeed.types import Correct, Outcome, Verdict
from rollfeed.workers import PooledGrader, WorkerPool


def grader(pool: WorkerPool, name: str = "grade", *, deadline_seconds: float = 30) -> PooledGrader:
    return PooledGrader(workers=pool, function_path=f"worker_tasks.{name}", deadline_seconds=deadline_seconds)


@pytest.mark.parametrize("hanging", ["hang", "spin"])
async def test_r35_one_of_64_graders_that_never_ends_costs_its_own_deadline(
    hanging: str, processes: Callable[[], set[int]]
) -> None:
    before = processes()
    deadline_seconds = 3.0
    async with WorkerPool(num_workers=2) as pool:
        grade = grader(pool, deadline_seconds=deadline_seconds)
        responses = [hanging if number == 17 else str(number % 8) for number in range(64)]
        started = time.monotonic()
        verdicts = await asyncio.gather(*(grade(response, "3", {}) for response in responses))
        seconds = time.monotonic() - started
        assert pool.counts.timeouts == 1
    assert seconds <= deadline_seconds + 2.0
    assert verdicts[17].outcome is Outcome.TIMEOUT
    assert verdicts[17].reward is None
    others = [(verdict.reward, verdict.correct) for number, verdict in enumerate(verdicts) if number != 17]
    right, wrong = (1.0, Correct.YES), (0.0, Correct.NO)
    assert others == [right if number % 8 == 3 else wrong for number in range(64) if number != 17]
    assert processes() == before


@pytest.mark.parametrize("reward", [0.0, 1.0, -1.0, {"score": 1.0, "format": 0.0}])
async def test_r36_rewards_cross_the_process_boundary_as_what_they_are(reward: Any) -> None:
    async with WorkerPool(num_workers=1) as pool:
        verdict = await grader(pool, "grade_with_reward")("r", "l", {"reward": reward})
    assert verdict == Verdict(reward=reward)


async def test_r36_no_reward_stays_none() -> None:
    async with WorkerPool(num_workers=1) as pool:
        verdict = await grader(pool, "grade_with_reward")("r", "l", {"reward": "none"})
    assert verdict == Verdict(reward=None, outcome=Outcome.ERROR, detail="not scored")


async def test_r37_every_member_of_a_group_gets_its_own_verdict_though_answers_repeat() -> None:
    async with WorkerPool(num_workers=2) as pool:
        verdicts = await asyncio.gather(*(grader(pool)(str(number % 2), "1", {}) for number in range(16)))
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0] * 8
    assert len({id(verdict) for verdict in verdicts}) == 16


async def test_a_worker_that_is_killed_is_exactly_one_error_verdict() -> None:
    async with WorkerPool(num_workers=2) as pool:
        responses = ["die" if number == 5 else "1" for number in range(20)]
        verdicts = await asyncio.gather(*(grader(pool)(response, "1", {}) for response in responses))
    failed = [verdict for verdict in verdicts if verdict.outcome is not Outcome.OK]
    assert failed == [verdicts[5]]
    assert verdicts[5].outcome is Outcome.ERROR
    assert "SIGKILL" in verdicts[5].detail


@pytest.mark.parametrize("metadata", [{"reward": float("nan")}, {"reward": float("inf")}, {}])
async def test_a_grader_that_raises_is_an_error_with_the_cause(metadata: dict[str, Any]) -> None:
    async with WorkerPool(num_workers=1) as pool:
        verdict = await grader(pool, "grade_with_reward")("r", "l", metadata)
    assert verdict.outcome is Outcome.ERROR
    assert "Error" in verdict.detail


async def test_a_result_that_is_no_verdict_is_an_error() -> None:
    async with WorkerPool(num_workers=1) as pool:
        verdict = await grader(pool, "grade_wrongly")("r", "l", {})
    assert verdict.outcome is Outcome.ERROR
    assert "no verdict" in verdict.detail
