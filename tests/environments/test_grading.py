from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rollfeed.environments import EnvironmentRegistry, environment_grader
from rollfeed.protocols import Grader
from rollfeed.types import Correct, Outcome, Verdict


@pytest.fixture
def grade(parity: Any) -> Grader:
    return environment_grader(EnvironmentRegistry([parity], find_entry_points=lambda: []))


def metadata(**changes: Any) -> dict[str, Any]:
    return {"environment": "my/parity", "version": 3, "params": {"number": 7}, **changes}


def test_response_is_handed_to_the_verifier(grade: Grader) -> None:
    assert grade("odd", None, metadata()).correct is Correct.YES
    assert grade("even", None, metadata()).correct is Correct.NO


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"environment": "my/parrity"}, "did you mean my/parity"),
        ({"environment": None}, "no environment and params"),
        ({"params": "odd"}, "no environment and params"),
        ({"version": 2}, "the prompt is of version 2, installed is 3"),
        ({"params": {}}, "verify raised KeyError"),
    ],
)
def test_what_cannot_be_graded_is_an_error_with_its_cause(grade: Grader, changes: dict[str, Any], detail: str) -> None:
    verdict = grade("odd", None, metadata(**changes))
    assert verdict.outcome is Outcome.ERROR
    assert verdict.reward is None
    assert detail in verdict.detail


def test_verifier_that_returns_no_verdict_is_an_error(parity: Any) -> None:
    class Careless(type(parity)):  # type: ignore[misc]
        def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
            return 1.0  # type: ignore[return-value]

    grade = environment_grader(EnvironmentRegistry([Careless()], find_entry_points=lambda: []))
    verdict = grade("odd", None, metadata())
    assert verdict.outcome is Outcome.ERROR
    assert "it must return a Verdict" in verdict.detail
