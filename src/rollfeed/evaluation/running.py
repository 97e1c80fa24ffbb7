"""Answers all sets at once.

Invariants: what comes back is ordered by set and index, whichever answer came first; the sets take turns, so that a
large one does not keep the others waiting; leaving, by error or cancellation, leaves no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollfeed.errors import RunFailedError
from rollfeed.evaluation.results import is_right
from rollfeed.evaluation.sets import EvalSet
from rollfeed.protocols import TokenEndpoint
from rollfeed.types import Completion, Group

AnswerGroup = Callable[[Group], Awaitable[Group]]
"""Answers a prompt as often as its set says, and scores the answers."""


@dataclass(slots=True)
class EvalProgress:
    """The answers of an evaluation so far."""

    num_answers: int
    """To be made in all."""
    num_answered: int = 0
    num_scored: int = 0
    num_right: int = 0
    num_failed: int = 0
    """Prompts with an answer that could not be made or scored."""
    seconds: float = 0.0

    def add(self, eval_set: EvalSet, group: Group) -> None:
        """Count a prompt whose answers have been scored, or that failed."""
        if not group.is_finished:
            self.num_failed += 1
            return
        plan = eval_set.plan
        for rollout in group.rollouts:
            self.num_scored += 1
            self.num_right += is_right(rollout, reward_key=plan.reward_key, threshold=plan.correct_threshold)


class NamedEndpoint:
    """An endpoint whose request ids say which set they are of, apart from those of other sets and of training."""

    def __init__(self, endpoint: TokenEndpoint, name: str) -> None:
        self._endpoint = endpoint
        self._name = name

    @property
    def policy_version(self) -> int:
        return self._endpoint.policy_version

    async def generate(self, *args: Any, request_id: str, **settings: Any) -> Completion:
        return await self._endpoint.generate(*args, request_id=f"eval-{self._name}-{request_id}", **settings)


async def answer_sets(
    sets: Sequence[tuple[EvalSet, AnswerGroup]],
    *,
    max_groups: int,
    on_group: Callable[[EvalSet, Group], None] | None = None,
) -> list[list[Group]]:
    """Return the group of every prompt, set by set.

    At most ``max_groups`` prompts are in flight; ``on_group`` is told of each group when it is complete.

    Raises:
        RunFailedError: If the engine aborted an answer, or ``answer`` raised it.
    """
    results: list[dict[int, Group]] = [{} for _ in sets]
    turns = _turns([len(eval_set.prompts) for eval_set, _ in sets])

    async def work() -> None:
        for number, index in turns:
            eval_set, answer = sets[number]
            group = await answer(eval_set.draw(index))
            if not group.is_finished and group.error is None:
                raise RunFailedError(
                    f"eval set {eval_set.name}: an answer was aborted; evaluate while no step of training ends"
                )
            results[number][index] = group
            if on_group is not None:
                on_group(eval_set, group)

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


def policy_versions(groups: Sequence[Group], *, otherwise: int) -> tuple[int, int]:
    """Return the lowest and the highest policy version that answered; ``otherwise`` where nothing was sampled."""
    versions = set().union(*(group.policy_versions for group in groups)) or {otherwise}
    return min(versions), max(versions)
