from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rollfeed.environments import EnvironmentRegistry, RlveGrader
from rollfeed.types import Correct, Outcome


class NoWorkers:
    async def call(self, *args: Any, **settings: Any) -> Any:
        raise AssertionError("called")


@pytest.fixture
def grade(parity: Any) -> RlveGrader:
    registry = EnvironmentRegistry([parity], find_entry_points=lambda: [])
    return RlveGrader(registry, workers=NoWorkers(), deadline_seconds=1.0)


CONFIG = {"seed": 5, "parameter": {"number": 7}, "passing_reward_threshold": 1.0}


@pytest.mark.parametrize(
    "problem",
    [
        {"config": CONFIG, "problem_difficulty": 2},
        {"config": {"parameter": {"number": 7}}},
        {"params": {"number": 7}, "version": 3},
        {"params": {"number": 7}, "config": None},
    ],
)
async def test_registered_environment_is_graded_by_the_parameters_of_the_row(
    grade: RlveGrader, problem: dict[str, Any]
) -> None:
    metadata = {"environment": "my/parity", **problem}
    assert (await grade("odd", None, metadata)).correct is Correct.YES
    assert (await grade("even", None, metadata)).correct is Correct.NO


async def test_registered_environment_makes_the_problem_again_from_seed_and_difficulty(grade: RlveGrader) -> None:
    metadata = {"environment": "my/parity", "config": {"seed": 5}, "problem_difficulty": 2}
    rewards = [(await grade(response, None, metadata)).reward for response in ("odd", "even")]
    assert sorted(map(str, rewards)) == ["0.0", "1.0"]


async def test_named_rewards_are_given_where_a_reward_key_chooses(grade: RlveGrader) -> None:
    metadata = {"environment": "my/parity", "config": CONFIG}
    assert (await grade("odd", None, metadata)).reward == 1.0
    chosen = await grade("odd", None, metadata | {"reward_key": "accuracy"})
    assert chosen.reward == {"reward": 1.0, "accuracy": 1.0, "format_score": 1.0}


@pytest.mark.parametrize(
    ("metadata", "detail"),
    [
        ({}, "environment = None"),
        ({"environment": ""}, "environment = ''"),
        ({"environment": ["my/parity"]}, "environment = ['my/parity']"),
        ({"environment": "my/parity"}, "no config with the problem"),
        ({"environment": "my/parity", "config": "{}"}, "no config with the problem"),
        ({"environment": "my/parity", "config": {"parameter": [7]}}, "no config with the problem"),
        ({"environment": "my/parity", "config": {"seed": "5"}, "problem_difficulty": 2}, "no config with the problem"),
        ({"environment": "my/parity", "config": {"seed": 5}, "problem_difficulty": True}, "no config with the problem"),
        ({"environment": "my/parity", "config": {"parameter": {}}}, "verify raised KeyError"),
        ({"environment": "my/parity", "config": CONFIG, "version": 1}, "the prompt is of version 1"),
        ({"environment": "my/parrity", "config": CONFIG}, "did you mean my/parity"),
    ],
)
async def test_what_cannot_be_graded_is_an_error_with_its_cause(
    grade: RlveGrader, metadata: dict[str, Any], detail: str
) -> None:
    verdict = await grade("odd", None, metadata)
    assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)
    assert detail in verdict.detail


@pytest.mark.parametrize("name", ["Multiplication", "rlve/Multiplication"])
async def test_without_rlve_gym_the_error_says_what_to_install(
    grade: RlveGrader, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not (Path(folder) / "Gym").exists()])
    verdict = await grade("6", None, {"environment": name, "config": CONFIG})
    assert verdict.outcome is Outcome.ERROR
    assert "pip install 'rollfeed[rlve]'" in verdict.detail
