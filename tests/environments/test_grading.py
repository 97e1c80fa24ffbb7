from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from rollfeed.environments import ENTRY_POINT_GROUP, EnvironmentGrader, EnvironmentRegistry
from rollfeed.errors import WorkerTimeoutError
from rollfeed.types import Correct, Outcome, Verdict


def metadata(**changes: Any) -> dict[str, Any]:
    return {"environment": "my/parity", "version": 3, "params": {"number": 7}, **changes}


@pytest.fixture
def grade(parity: Any, make_grader: Callable[..., EnvironmentGrader]) -> EnvironmentGrader:
    return make_grader(parity)


async def test_response_is_handed_to_the_verifier(grade: EnvironmentGrader) -> None:
    assert (await grade("odd", None, metadata())).correct is Correct.YES
    assert (await grade("even", None, metadata())).correct is Correct.NO


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"environment": "my/parrity"}, "did you mean my/parity"),
        ({"environment": None}, "no environment and params"),
        ({"environment": 3}, "no environment and params"),
        ({"params": "odd"}, "no environment and params"),
        ({"version": 2}, "the prompt is of version 2, installed is 3"),
        ({"version": "3"}, "the prompt is of version 3, installed is 3"),
        ({"params": {}}, "verify raised KeyError"),
        ({"params": {"number": None}}, "verify raised TypeError"),
    ],
)
async def test_what_cannot_be_graded_is_an_error_with_its_cause(
    grade: EnvironmentGrader, changes: dict[str, Any], detail: str
) -> None:
    verdict = await grade("odd", None, metadata(**changes))
    assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)
    assert detail in verdict.detail


async def test_verifier_that_returns_no_verdict_is_an_error(
    parity: Any, make_grader: Callable[..., EnvironmentGrader]
) -> None:
    class Careless(type(parity)):  # type: ignore[misc]
        def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
            return 1.0  # type: ignore[return-value]

    verdict = await make_grader(Careless())("odd", None, metadata())
    assert verdict.outcome is Outcome.ERROR
    assert "it must return a Verdict" in verdict.detail


class ScriptedWorkers:
    """Answers every call with a value, or raises it."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.calls: list[tuple[Any, ...]] = []

    async def call(
        self, function_path: str, args: Sequence[Any], *, deadline_seconds: float, cached: bool = False
    ) -> Any:
        self.calls.append((function_path, list(args), deadline_seconds, cached))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def grader_of_a_package(workers: ScriptedWorkers) -> EnvironmentGrader:
    point = EntryPoint(name="my/parity", value="no_such_module:Parity", group=ENTRY_POINT_GROUP)
    registry = EnvironmentRegistry(find_entry_points=lambda: [point])
    return EnvironmentGrader(registry, workers=workers, deadline_seconds=2.0)


async def test_environments_of_other_packages_verify_in_workers_and_are_not_imported_here() -> None:
    workers = ScriptedWorkers({"reward": 0.5, "correct": "no", "extracted": "odd"})
    grade = grader_of_a_package(workers)
    assert await grade("odd", None, metadata()) == Verdict(reward=0.5, correct=Correct.NO, extracted="odd")
    problem = {"version": 3, "params": {"number": 7}}
    assert workers.calls == [("rollfeed.environments.verifying:my/parity", [problem, "odd"], 2.0, True)]
    assert (await grade("5", None, {"environment": "core/add_numbers", "params": {"terms": [2, 3]}})).reward == 1.0
    assert len(workers.calls) == 1


async def test_failure_of_a_worker_is_left_to_the_hub_to_name() -> None:
    with pytest.raises(WorkerTimeoutError):
        await grader_of_a_package(ScriptedWorkers(WorkerTimeoutError("late")))("odd", None, metadata())
