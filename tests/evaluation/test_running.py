from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from rollfeed.errors import RunFailedError
from rollfeed.evaluation import EvalSet, answer_sets
from rollfeed.types import GroupResult, GroupStatus, PromptDraw


async def test_results_are_ordered_by_index_whichever_came_first(
    make_set: Callable[..., EvalSet], result_of: Callable[..., GroupResult]
) -> None:
    random, finished = Random(0), []

    async def answer(draw: PromptDraw) -> GroupResult:
        for _ in range(random.randrange(20)):
            await asyncio.sleep(0)
        finished.append(draw.group_index)
        return result_of([1], index=draw.group_index)

    sets = [make_set("a", num_prompts=9), make_set("b", num_prompts=4)]
    results = await answer_sets([(each, answer) for each in sets], max_groups=20)
    assert [[result.group.group_index for result in each] for each in results] == [list(range(9)), list(range(4))]
    assert finished != sorted(finished)


async def test_sets_take_turns_and_no_more_than_the_limit_are_under_way(
    make_set: Callable[..., EvalSet], result_of: Callable[..., GroupResult]
) -> None:
    started: list[str] = []
    under_way = peak = 0

    async def answer(draw: PromptDraw) -> GroupResult:
        nonlocal under_way, peak
        started.append(draw.prompt.prompt_id)
        under_way += 1
        peak = max(peak, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return result_of([1], index=draw.group_index)

    sets = [make_set("large", num_prompts=40), make_set("small", num_prompts=2)]
    await answer_sets([(each, answer) for each in sets], max_groups=3)
    assert started[:5] == ["large/0", "small/0", "large/1", "small/1", "large/2"]
    assert peak == 3


async def test_an_error_is_raised_as_it_is_and_leaves_no_task(
    make_set: Callable[..., EvalSet], result_of: Callable[..., GroupResult]
) -> None:
    async def answer(draw: PromptDraw) -> GroupResult:
        if draw.group_index == 1:
            raise RunFailedError("too many rollouts failed")
        await asyncio.Event().wait()
        raise AssertionError

    before = asyncio.all_tasks()
    with pytest.raises(RunFailedError, match="too many rollouts failed"):
        await answer_sets([(make_set(num_prompts=5), answer)], max_groups=5)
    assert asyncio.all_tasks() == before


async def test_aborted_answers_end_the_evaluation(
    make_set: Callable[..., EvalSet], result_of: Callable[..., GroupResult]
) -> None:
    async def answer(draw: PromptDraw) -> GroupResult:
        return GroupResult(group=result_of([1]).group, status=GroupStatus.ABORTED)

    with pytest.raises(RunFailedError, match="eval set numbers: an answer was aborted"):
        await answer_sets([(make_set(), answer)], max_groups=5)


async def test_every_group_is_told_of_once(make_set: Callable[..., EvalSet], result_of: Callable[..., Any]) -> None:
    told: list[tuple[str, int]] = []

    async def answer(draw: PromptDraw) -> GroupResult:
        return result_of([1], index=draw.group_index)

    await answer_sets(
        [(make_set("a"), answer), (make_set("b"), answer)],
        max_groups=1,
        on_group=lambda eval_set, result: told.append((eval_set.name, result.group.group_index)),
    )
    assert told == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
