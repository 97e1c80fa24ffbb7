"""Puts what a teacher says into the samples of a group."""

from __future__ import annotations

import asyncio
from collections.abc import MutableSequence, Sequence
from dataclasses import replace

from rollfeed.completions import freeze
from rollfeed.errors import EngineError
from rollfeed.protocols import Teacher
from rollfeed.types import Rollout, Verdict


async def ask_teacher(
    teacher: Teacher | None, rollouts: MutableSequence[Rollout], members: Sequence[int]
) -> Verdict | None:
    """Put what a teacher says into finished rollouts that are not scored; return the verdict where it fails.

    What it has said is kept then: another try asks only for the rest.
    """
    if teacher is None:
        return None
    problems: list[EngineError] = []

    async def ask(member: int) -> None:
        rollout = rollouts[member]
        try:
            told = [
                sample.teacher_logprobs if sample.teacher_logprobs is not None else await teacher.logprobs(sample)
                for sample in rollout.samples
            ]
        except EngineError as error:
            problems.append(error)
            return
        samples = [
            freeze(replace(sample, teacher_logprobs=logprobs))
            for sample, logprobs in zip(rollout.samples, told, strict=True)
        ]
        rollouts[member] = replace(rollout, samples=tuple(samples))

    async with asyncio.TaskGroup() as tasks:
        for member in members:
            if rollouts[member].has_finished and not rollouts[member].is_scored:
                tasks.create_task(ask(member))
    return Verdict.failed(str(problems[0])) if problems else None
