from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollfeed.errors import EngineUnavailableError
from rollfeed.protocols import Teacher
from rollfeed.rewards.hub import RewardHub
from rollfeed.testing import ScriptedEngine, TickEngine
from rollfeed.types import Sample, SampleStatus, StepCommit


class ScriptedTeacher(Teacher):
    """Finds token number n n times as unlikely as sure; ``before`` is awaited first, and may raise."""

    def __init__(self, before: Callable[[Sample], Any] = lambda sample: asyncio.sleep(0)) -> None:
        self._before = before
        self.asked: list[int] = []

    async def logprobs(self, sample: Sample) -> NDArray[np.float32]:
        self.asked.append(sample.index)
        await self._before(sample)
        return -np.arange(1, sample.response_length + 1, dtype=np.float32)


def taught(sample: Sample) -> bool:
    told = sample.teacher_logprobs
    return told is not None and np.array_equal(told, -np.arange(1, sample.response_length + 1, dtype=np.float32))


@pytest.mark.parametrize("mode", ["sync", "partial", "async"])
async def test_every_sample_has_the_teachers_logprobs_in_every_mode(mode: str, make_rollouts: Any) -> None:
    teacher, changes = ScriptedTeacher(), {"over_sampling_batch_size": 6} if mode == "partial" else {}
    engine = TickEngine(lambda rollout_id: 1 + rollout_id % 7) if mode == "partial" else ScriptedEngine()
    async with make_rollouts(engine, teacher=teacher, mode=mode, **changes) as rollouts:
        batches = [await rollouts.generate_batch() for _ in range(3)]
    assert all(taught(sample) for batch in batches for sample in batch.samples)
    assert len(batches[-1].samples) == 8


async def test_a_member_is_scored_by_the_teacher_while_others_are_generated(make_rollouts: Any) -> None:
    scored = asyncio.Event()

    async def generate(request: Any, *, services: Any) -> Any:
        if request.rollout_id == 0:  # ends only when another member has been scored
            await scored.wait()
        return await services.default(request, services=services)

    async def note(sample: Sample) -> None:
        scored.set()

    async with make_rollouts(ScriptedEngine(), generate_fn=generate, teacher=ScriptedTeacher(note)) as rollouts:
        async with asyncio.timeout(60):
            batch = await rollouts.generate_batch()
    assert all(map(taught, batch.samples))


async def test_a_teacher_that_fails_is_asked_again_and_nothing_is_generated_anew(make_rollouts: Any) -> None:
    failures = {3: 1}

    async def fail(sample: Sample) -> None:
        if failures.pop(sample.index, 0):
            raise EngineUnavailableError("teacher: no answer")

    teacher, engine = ScriptedTeacher(fail), ScriptedEngine()
    async with make_rollouts(engine, teacher=teacher, group_failure="retry") as rollouts:
        batch = await rollouts.generate_batch()
    assert [group.group_index for group in batch.groups] == [0, 1, 2, 3]
    assert sorted(teacher.asked) == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    assert batch.metrics["rollout/reward_error"] == 1


async def test_a_teacher_that_goes_on_failing_fails_the_rollout_with_the_reason(make_rollouts: Any) -> None:
    async def fail(sample: Sample) -> None:
        if sample.index == 3:
            raise EngineUnavailableError("teacher: http://127.0.0.1:1: connection refused")

    commits: list[StepCommit] = []
    async with make_rollouts(ScriptedEngine(), teacher=ScriptedTeacher(fail), commit=commits.append) as rollouts:
        batch = await rollouts.generate_batch()
    (dropped,) = commits[0].dropped
    first, second = dropped.group.rollouts
    assert (dropped.reason, second.status) == ("failed", SampleStatus.FAILED)
    assert "reward error: teacher: http://127.0.0.1:1: connection refused" in str(second.error)
    assert taught(first.samples[0])
    assert second.samples[0].teacher_logprobs is None
    assert second.samples[0].reward is None
    assert all(map(taught, batch.samples))


async def test_rewards_that_came_with_the_samples_outlive_a_teacher_that_fails_once(make_rollouts: Any) -> None:
    failures = {1: 1}

    async def fail(sample: Sample) -> None:
        if failures.pop(sample.index, 0):
            raise EngineUnavailableError("teacher: no answer")

    async def generate(request: Any, *, services: Any) -> list[Sample]:
        (sample,) = await services.default(request, services=services)
        return [replace(sample, reward=0.25), replace(sample, reward=0.75)]

    async with make_rollouts(
        ScriptedEngine(),
        generate_fn=generate,
        teacher=ScriptedTeacher(fail),
        scorer=RewardHub(graders={}, timeout_seconds=60.0),
        group_failure="retry",
    ) as rollouts:
        batch = await rollouts.generate_batch()
    assert [sample.reward for sample in batch.groups[0].samples] == [0.25, 0.75] * 2
    assert all(map(taught, batch.samples))
