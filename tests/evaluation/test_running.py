from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from rollfeed.errors import RunFailedError
from rollfeed.evaluation import EvalSet, answer_sets
from rollfeed.types import Group


async def test_results_are_ordered_by_index_whichever_came_first(
    make_set: Callable[..., EvalSet], result_of: Callable[..., Group]
) -> None:
    random, finished = Random(0), []

    async def answer(group: Group) -> Group:
        for _ in range(random.randrange(20)):
            await asyncio.sleep(0)
        finished.append(group.group_index)
        return result_of([1], index=group.group_index)

    sets = [make_set("a", num_prompts=9), make_set("b", num_prompts=4)]
    results = await answer_sets([(each, answer) for each in sets], max_groups=20)
    assert [[group.group_index for group in each] for each in results] == [list(range(9)), list(range(4))]
    assert finished != sorted(finished)


async def test_sets_take_turns_and_no_more_than_the_limit_are_in_flight(
    make_set: Callable[..., EvalSet], result_of: Callable[..., Group]
) -> None:
    started: list[str] = []
    in_flight = peak = 0

    async def answer(group: Group) -> Group:
        nonlocal in_flight, peak
        started.append(group.prompt.prompt_id)
        in_flight += 1
        peak = max(peak, in_flight)
        await asyncio.sleep(0)
        in_flight -= 1
        return result_of([1], index=group.group_index)

    sets = [make_set("large", num_prompts=40), make_set("small", num_prompts=2)]
    await answer_sets([(each, answer) for each in sets], max_groups=3)
    assert started[:5] == ["large/0", "small/0", "large/1", "small/1", "large/2"]
    assert peak == 3


async def test_an_error_is_raised_as_it_is_and_leaves_no_task(
    make_set: Callable[..., EvalSet], result_of: Callable[..., Group]
) -> None:
    async def answer(group: Group) -> Group:
        if group.group_index == 1:
            raise RunFailedError("too many rollouts failed")
        await asyncio.Event().wait()
        raise AssertionError

    before = asyncio.all_tasks()
    with pytest.raises(RunFailedError, match="too many rollouts failed"):
        await answer_sets([(make_set(num_prompts=5), answer)], max_groups=5)
    assert asyncio.all_tasks() == before


async def test_aborted_answers_end_the_evaluation(
    make_set: Callable[..., EvalSet], result_of: Callable[..., Group]
) -> None:
    async def answer(group: Group) -> Group:
        return replace(result_of([1]), rollouts=())

    with pytest.raises(RunFailedError, match="eval set numbers: an answer was aborted"):
        await answer_sets([(make_set(), answer)], max_groups=5)


async def test_every_group_is_told_of_once(make_set: Callable[..., EvalSet], result_of: Callable[..., Any]) -> None:
    told: list[tuple[str, int]] = []

    async def answer(group: Group) -> Group:
        return result_of([1], index=group.group_index)

    await answer_sets(
        [(make_set("a"), answer), (make_set("b"), answer)],
        max_groups=1,
        on_group=lambda eval_set, group: told.append((eval_set.name, group.group_index)),
    )
    assert told == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
