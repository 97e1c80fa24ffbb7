"""Answers all sets at once.

Invariants: what comes back is ordered by set and index, whichever answer came first; the sets take turns, so that a
large one does not keep the others waiting; leaving, by error or cancellation, leaves no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from rollfeed.errors import RunFailedError
from rollfeed.evaluation.sets import EvalSet
from rollfeed.types import GroupResult, GroupStatus, PromptDraw

AnswerGroup = Callable[[PromptDraw], Awaitable[GroupResult]]
"""Answers a prompt as often as its set says, and scores the answers."""


async def answer_sets(
    sets: Sequence[tuple[EvalSet, AnswerGroup]],
    *,
    max_groups: int,
    on_group: Callable[[EvalSet, GroupResult], None] | None = None,
) -> list[list[GroupResult]]:
    """Return the group of every prompt, set by set.

    Args:
        sets: Each with what answers its prompts.
        max_groups: Prompts under way at once.
        on_group: Told of each group when it is complete.

    Raises:
        RunFailedError: If the engine aborted an answer, or ``answer`` raised it.
    """
    results: list[dict[int, GroupResult]] = [{} for _ in sets]
    turns = _turns([len(eval_set.prompts) for eval_set, _ in sets])

    async def work() -> None:
        for number, index in turns:
            eval_set, answer = sets[number]
            result = await answer(eval_set.draw(index))
            if result.status is GroupStatus.ABORTED:
                raise RunFailedError(
                    f"eval set {eval_set.name}: an answer was aborted; evaluate while no step of training ends"
                )
            results[number][index] = result
            if on_group is not None:
                on_group(eval_set, result)

    try:
        async with asyncio.TaskGroup() as tasks:
            for worker in range(min(max_groups, sum(len(eval_set.prompts) for eval_set, _ in sets))):
                tasks.create_task(work(), name=f"eval {worker}")
    except* Exception as errors:
        raise _first(errors) from None
    return [[by_index[index] for index in sorted(by_index)] for by_index in results]


def _turns(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the numbers and indices of all prompts, one of each set in turn."""
    for index in range(max(lengths)):
        for number, length in enumerate(lengths):
            if index < length:
                yield number, index


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
