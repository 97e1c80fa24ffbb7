"""The declared guess rates hold for answers that are given without solving anything."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from rollfeed.environments import EnvironmentRegistry, HasGuessRate, make_task
from rollfeed.environments.builtin import BUILTIN_ENVIRONMENTS
from rollfeed.protocols import Environment, Task
from rollfeed.types import Correct

NUM_TASKS = 400
LEVELS = (0, 1, 2, 6)

PICKS: dict[str, Callable[[Task], str]] = {
    "core/add_numbers": lambda task: "10",
    "core/compare_max": lambda task: str(task.params["numbers"][0]),
    "core/count_symbol": lambda task: "1",
    "core/lookup_table": lambda task: task.question.partition("\n")[0].rpartition(" ")[2],
    "core/make_target": lambda task: " + ".join(map(str, task.params["numbers"])),
    "core/mod_chain": lambda task: "3",
    "core/sort_numbers": lambda task: ", ".join(map(str, task.params["numbers"])),
    "core/close_brackets": lambda task: "))))))))"[: len(task.params["missing"])],
}
"""Guesses that know the form of an answer, where there is a better one than the answer to another problem."""


def best_num_right(environment: Environment, level: int) -> int:
    """Return the number of problems that the best of several blind answers solves."""
    tasks = [make_task(environment, level=level, index=index, run_seed=5) for index in range(NUM_TASKS)]
    others = [str(make_task(environment, level=level, index=index, run_seed=6).answer) for index in range(NUM_TASKS)]
    ((commonest, _),) = Counter(others).most_common(1)
    guesses = [[commonest] * NUM_TASKS, ["0"] * NUM_TASKS, others]
    if environment.environment_id in PICKS:
        guesses.append([PICKS[environment.environment_id](task) for task in tasks])
    return max(
        sum(
            environment.verify(task.params, answer).correct is Correct.YES
            for task, answer in zip(tasks, each, strict=True)
        )
        for each in guesses
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("environment", BUILTIN_ENVIRONMENTS, ids=lambda env: env.environment_id)
def test_blind_answers_are_right_as_often_as_is_declared(environment: Environment, level: int) -> None:
    assert isinstance(environment, HasGuessRate)
    low, high = environment.guess_rate(level)
    assert 0.0 <= low <= high < 1.0
    num_right = best_num_right(environment, level)

    def slack(rate: float) -> float:
        """Return four standard deviations, and what the rarest hits need: many shares are looked at."""
        return 4 * math.sqrt(NUM_TASKS * rate * (1 - rate)) + 3

    assert num_right <= NUM_TASKS * high + slack(high)
    assert num_right >= NUM_TASKS * low - slack(low)
    if environment.environment_id in PICKS and level < 2:
        assert num_right >= NUM_TASKS * 0.8 * high - slack(high), "declared is more than can be guessed"


def test_an_episode_that_heeds_no_answer_finds_as_many_numbers_as_is_declared() -> None:
    environment = EnvironmentRegistry().get("core/guess_number")
    assert isinstance(environment, HasGuessRate)
    num_found = 0
    for index in range(NUM_TASKS):
        task = make_task(environment, level=1, index=index, run_seed=0)
        state = environment.start(task.params)  # type: ignore[attr-defined]
        for guess in random.Random(index).sample(range(1, 9), 4):
            step = environment.step(state, str(guess))  # type: ignore[attr-defined]
            if step.verdict is not None:
                num_found += step.verdict.correct is Correct.YES
                break
            state = step.state
    assert environment.guess_rate(1)[1] == pytest.approx(num_found / NUM_TASKS, abs=0.08)
