"""``core/grid_walk``: a way through a grid whose walls show only to who stands beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, TypeAlias

from rollfeed.answers import find_answer
from rollfeed.environments.builtin.scoring import graded, no_answer
from rollfeed.protocols import EnvironmentStep
from rollfeed.types import Verdict

_Square: TypeAlias = tuple[int, int]

_WAYS: Mapping[str, _Square] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_MOVE = re.compile(r"\b(?:up|down|left|right)\b", re.IGNORECASE)
_INSTRUCTION = "Answer with moves: up, down, left or right."
_MAX_TRIES = 200


class GridWalk:
    """Reach a square of a grid of ``3 + level // 2`` squares a side with ``level`` walls.

    There are twice as many moves as the shortest way has, and two more; a turn may have several. One into a wall, or
    out of the grid, is spent and ends the turn. An episode is worth 1 for the shortest way, down to 0.5 for the
    longest, and one that does not arrive, less than 0.5 by how near it came.
    """

    environment_id: str = "core/grid_walk"
    version: int = 1
    summary: str = "walk to a square of a grid in several turns; levels add walls that do not show, and enlarge it"
    max_level: int | None = 10

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the chance to arrive by a way that was drawn for another problem."""
        return 0.0, 0.15

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Draw walls, and squares ``2 + level // 2`` moves apart or more. Raises ValueError if 200 grids have none."""
        size = 3 + level // 2
        squares = [(row, column) for row in range(size) for column in range(size)]
        for _ in range(_MAX_TRIES):
            square, goal, *walls = random.sample(squares, 2 + level)
            params: dict[str, Any] = {"size": size, "walls": walls, "square": square, "goal": goal}
            path = _shortest(params)
            if path is not None and 2 + level // 2 <= len(path) <= 2 * size:
                break
        else:
            raise ValueError(f"no way through {_MAX_TRIES} grids")
        params |= {"shortest": len(path), "max_moves": 2 * len(path) + 2}
        question = (
            f"You are on a grid of {size} rows and {size} columns, in {_named(square)}, and want to get to "
            f"{_named(goal)} in at most {params['max_moves']} moves. Some squares are walls. After your moves I say "
            f"where you are, and which ways are open.\nOpen: {', '.join(_open(params))}.\n{_INSTRUCTION}"
        )
        return question, params, ", ".join(path)

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Walk all moves of a response from the start."""
        if not (moves := _moves(response)):
            return no_answer("move")
        walked = _walk(self.start(params), moves)
        is_there = tuple(walked["square"]) == tuple(params["goal"])
        return graded(", ".join(moves), is_right=is_there, partial=_nearness(walked))

    def start(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the problem, with the moves that are spent."""
        return {**params, "num_moves": 0}

    def step(self, state: Mapping[str, Any], response: str) -> EnvironmentStep:
        """Walk, and say where that led and which ways are open; a turn without a move spends one."""
        moves = _moves(response)
        state = _walk(state, moves) if moves else {**state, "num_moves": state["num_moves"] + 1}
        if tuple(state["square"]) == tuple(state["goal"]):
            detours = (state["num_moves"] - state["shortest"]) / (state["max_moves"] - state["shortest"])
            return EnvironmentStep(verdict=Verdict.graded(True, reward=1.0 - 0.5 * detours))
        if state["num_moves"] >= state["max_moves"]:
            return EnvironmentStep(verdict=self.give_up(state))
        told = f"You are in {_named(state['square'])}. Open: {', '.join(_open(state))}."
        told = told if moves else f"{told}\n{_INSTRUCTION}"
        return EnvironmentStep(state=state, messages=({"role": "user", "content": told},))

    def give_up(self, state: Mapping[str, Any]) -> Verdict:
        """Return less than 0.5, by how near the square is."""
        return graded("", is_right=False, partial=_nearness(state), detail="did not arrive")


def _moves(response: str) -> list[str]:
    answer = find_answer(response.rpartition(_INSTRUCTION)[2])
    return [] if answer is None else [found.lower() for found in _MOVE.findall(answer.text)]


def _named(square: Sequence[int]) -> str:
    return f"row {square[0] + 1}, column {square[1] + 1}"


def _open(state: Mapping[str, Any]) -> dict[str, _Square]:
    """Return the squares that can be walked to, by the way there."""
    (row, column), walls, inside = state["square"], {tuple(wall) for wall in state["walls"]}, range(state["size"])
    beside = {way: (row + down, column + right) for way, (down, right) in _WAYS.items()}
    return {way: to for way, to in beside.items() if to not in walls and to[0] in inside and to[1] in inside}


def _walk(state: Mapping[str, Any], moves: Sequence[str]) -> dict[str, Any]:
    """Return the state after moves: up to the goal, the first that cannot be made, or the last that there is."""
    walked = dict(state)
    for way in moves[: state["max_moves"] - state["num_moves"]]:
        walked["num_moves"] += 1
        ahead = _open(walked).get(way)
        if ahead is None:
            break
        walked["square"] = ahead
        if ahead == tuple(state["goal"]):
            break
    return walked


def _shortest(state: Mapping[str, Any]) -> list[str] | None:
    """Return a shortest way to the goal, or None."""
    ways: dict[_Square, list[str]] = {tuple(state["square"]): []}
    for square in (ahead := list(ways)):  # it grows on the way
        for way, to in _open({**state, "square": square}).items():
            if to not in ways:
                ways[to] = [*ways[square], way]
                ahead.append(to)
    return ways.get(tuple(state["goal"]))


def _nearness(state: Mapping[str, Any]) -> float:
    """Return half the share of the shortest way that lies behind."""
    return 0.5 * max(0.0, 1 - len(_shortest(state) or []) / int(state["shortest"]))
