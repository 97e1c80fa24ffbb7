"""The environments that answer back, but for core/guess_number."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from rollfeed.environments import make_task
from rollfeed.environments.builtin import CalcTool, GridWalk
from rollfeed.protocols import EnvironmentStep, MultiTurnEnvironment
from rollfeed.types import Correct

CALC = {"expression": "(12 - 2) * 3", "max_calls": 2}
GRID = {"size": 3, "walls": [[0, 1]], "square": [0, 0], "goal": [0, 2], "shortest": 4, "max_moves": 10}
"""Start and goal in the first row, with a wall between them."""


def play(environment: MultiTurnEnvironment, params: dict[str, object], turns: Sequence[str]) -> list[EnvironmentStep]:
    state, steps = environment.start(params), []
    for turn in turns:
        steps.append(environment.step(json.loads(json.dumps(state)), turn))
        state = steps[-1].state
    return steps


def said(step: EnvironmentStep) -> str:
    (message,) = step.messages
    return str(message["content"])


def test_calculator_answers_calls_and_any_other_turn_is_the_answer() -> None:
    *calls, last = play(CalcTool(), CALC, ["calc: 12 - 2", "<think>next</think>Calc: 10\u00d73", "It is 30."])
    assert [said(step) for step in calls] == ["= 10", "= 30"]
    assert last.verdict is not None
    assert (last.verdict.reward, last.verdict.correct, last.verdict.detail) == (1.0, Correct.YES, "2 calls")


def test_wrong_answer_earns_more_after_a_call_and_no_answer_nothing() -> None:
    (with_call,) = play(CalcTool(), CALC, ["calc: 12", "31"])[1:]
    (without,) = play(CalcTool(), CALC, ["31"])
    (nothing,) = play(CalcTool(), CALC, ["I do not know"])
    rewards = [step.verdict.reward for step in (nothing, without, with_call) if step.verdict]
    assert 0.0 == rewards[0] < rewards[1] < rewards[2] < 0.5  # type: ignore[operator]


def test_calculator_says_what_it_cannot_work_out_and_ends_after_its_last_call() -> None:
    *calls, last = play(CalcTool(), CALC, ["calc: 2 ** 9", "calc: 1 / 0", "calc: 3"])
    assert [said(step) for step in calls] == [
        "The calculator says: only + - * / and brackets are known.",
        "The calculator says: it divides by zero.",
    ]
    assert last.verdict is not None
    assert (last.verdict.reward, last.verdict.format_ok) == (0.0, False)


def test_call_is_not_taken_for_the_answer_it_contains() -> None:
    assert CalcTool().verify(CALC, "calc: 30").correct is Correct.NO
    assert CalcTool().verify(CALC, "30").correct is Correct.YES


def test_walk_is_told_where_it_is_and_what_is_open() -> None:
    first, second, third, last = play(GridWalk(), GRID, ["right", "Down, then right", "", "right, up, left"])
    assert said(first) == "You are in row 1, column 1. Open: down."
    assert said(second) == "You are in row 2, column 2. Open: down, left, right."
    assert said(third).endswith("Answer with moves: up, down, left or right.")
    assert last.verdict is not None
    assert (last.verdict.correct, last.verdict.reward) == (Correct.YES, 1.0 - 0.5 * (6 - 4) / 6)


def test_move_into_a_wall_is_spent_and_ends_the_turn() -> None:
    (step,) = play(GridWalk(), GRID, ["right, down, down"])
    assert (step.state["square"], step.state["num_moves"]) == ([0, 0], 1)


def test_longer_ways_and_ways_that_do_not_arrive_earn_less() -> None:
    def reward(turns: Sequence[str]) -> float:
        verdict = play(GridWalk(), GRID, turns)[-1].verdict
        assert verdict is not None
        return verdict.reward  # type: ignore[return-value]

    direct = {**GRID, "walls": [], "shortest": 2, "max_moves": 6}
    assert GridWalk().verify(direct, "right, right").correct is Correct.YES
    assert play(GridWalk(), direct, ["right right"])[-1].verdict.reward == 1.0  # type: ignore[union-attr]
    late = reward(["down, up", "down, up", "down, right, right, up"])
    near, far = reward(["down, right", *["up"] * 8]), reward(["up"] * 10)
    assert 0.0 == far < near < 0.5 < late < 1.0


@pytest.mark.parametrize("level", range(11))
def test_shortest_way_is_right_and_fits_into_half_the_moves(level: int) -> None:
    for index in range(20):
        task = make_task(GridWalk(), level=level, index=index, run_seed=9)
        (step,) = play(GridWalk(), dict(task.params), [str(task.answer)])
        assert step.verdict is not None
        assert step.verdict.reward == 1.0
        assert 2 * str(task.answer).count(",") + 4 == task.params["max_moves"]


@pytest.mark.parametrize("environment", [CalcTool(), GridWalk()], ids=lambda env: env.environment_id)
def test_episodes_of_nonsense_end_and_are_not_right(environment: MultiTurnEnvironment) -> None:
    for level in (0, 5, 10):
        task = make_task(environment, level=level, index=0, run_seed=0)
        for turn in ("", "calc: 1", "up, up", "\\boxed{", "0", "9" * 5_000, "up " * 5_000):
            state = environment.start(task.params)
            for _ in range(task.params.get("max_moves", 0) + task.params.get("max_calls", 0) + 1):
                step = environment.step(state, turn)
                if step.verdict is not None:
                    break
                state = step.state
            assert step.verdict is not None
            assert step.verdict.correct is Correct.NO
        assert environment.give_up(environment.start(task.params)).correct is Correct.NO
