from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollfeed.app.environments.conformance import Conformance, check_environments
from rollfeed.app.environments.ways_of_asking import check_asking
from rollfeed.config import EnvironmentSettings
from rollfeed.environments import EnvironmentGrader, EnvironmentRegistry
from rollfeed.environments.adapters import known_names
from rollfeed.environments.adapters.formulas import is_formula
from rollfeed.environments.making import EnvironmentFacts, PooledTaskMaker, describe_environments
from rollfeed.errors import ConfigError
from rollfeed.protocols import Task
from rollfeed.types import Correct
from rollfeed.workers import WorkerPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("Gym") is None, reason="rlve-gym is not installed")

LOST_IN_JSON = ("BucketSorting", "Cinema", "LargestConvexPolygon", "QuadMagicItems")
"""Tuples and numbers as keys."""


def test_all_names_are_known_without_an_import() -> None:
    assert len(known_names("rlve")) == 400
    ids = EnvironmentRegistry().ids()
    assert sum(each.startswith("rlve/") for each in ids) == 400
    assert {"rlve/CountdownEqual", "rlve/CountdownClose", "core/copy_text"} <= set(ids)


def test_unknown_name_tells_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean rlve/Sorting"):
        EnvironmentRegistry().get("rlve/Sortin")


async def test_they_keep_what_environments_promise() -> None:
    ids = [f"rlve/{name}" for name in (*LOST_IN_JSON, "BinaryAlternation", "Integral", "PolyaModel", "Sorting")]
    reports = await check_environments(ids, levels=[0, 3], num_problems=6, deadline_seconds=240.0)
    assert {report.environment_id: report.outcome for report in reports} == dict.fromkeys(ids, Conformance.PASSED)
    assert all(level.numbers["num_problems"] == 6 for report in reports for level in report.levels)
    assert all(level.numbers["reads"] in ([], ["tags", "boxed"]) for report in reports for level in report.levels)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
async def test_nearly_all_keep_it_at_their_first_level() -> None:
    ids = [f"rlve/{name}" for name in sorted(known_names("rlve"))]
    reports = await check_environments(ids, levels=[0], deadline_seconds=20.0)
    others = {report.environment_id: report for report in reports if report.outcome is not Conformance.PASSED}
    assert len(reports) - len(others) >= 390, others


async def make_tasks(workers: WorkerPool, name: str, levels: Sequence[int]) -> tuple[EnvironmentFacts, list[Task]]:
    (facts,) = await describe_environments([(f"rlve/{name}", {})], workers=workers)
    turns = asyncio.Semaphore(1)
    async with PooledTaskMaker(facts, run_seed=5, workers=workers, turns=turns, deadline_seconds=30.0) as maker:
        return facts, [await maker.make(level=level, index=0) for level in levels]


async def test_problems_get_harder_and_are_verified_between_marks(workers: WorkerPool) -> None:
    facts, tasks = await make_tasks(workers, "Sorting", (0, 3, 6, 0))
    numbers = [task.params["parameter"]["N"] for task in tasks]
    assert numbers[0] == numbers[3] < numbers[1] < numbers[2]

    grader = EnvironmentGrader(EnvironmentRegistry(), workers=workers, deadline_seconds=30.0)
    metadata = {"environment": "rlve/Sorting", "params": tasks[1].params}
    responses = (f"<answer>{tasks[1].answer}</answer>", r"\boxed{0}", "<answer>none</answer>", str(tasks[1].answer))
    verdicts = [await grader(response, None, metadata) for response in responses]
    assert [(each.reward, each.correct, each.format_ok, each.detail) for each in verdicts] == [
        (1.0, Correct.YES, True, "RLVE-Gym: 1"),
        (0.25, Correct.NO, True, "RLVE-Gym: -0.5"),
        (0.0, Correct.NO, False, "RLVE-Gym: -1"),
        (0.0, Correct.NO, False, "RLVE-Gym: -1"),
    ]

    chosen = EnvironmentSettings(id="rlve/Sorting")
    with pytest.raises(ConfigError, match="set answer_marker_type = '<answer></answer>', or"):
        check_asking(facts, chosen, chosen)
    for asked in (
        {"answer_marker_type": "\\boxed{}"},
        {"custom_prompt_preprocessor": "TinyZero", "apply_chat_template": False},
    ):
        chosen = EnvironmentSettings.model_validate({"id": "rlve/Sorting", **asked})
        check_asking(facts, chosen, chosen)


async def test_answer_that_is_a_program_is_not_run(workers: WorkerPool, tmp_path: Path) -> None:
    _, (task,) = await make_tasks(workers, "Integral", [0])
    grader = EnvironmentGrader(EnvironmentRegistry(), workers=workers, deadline_seconds=30.0)
    metadata = {"environment": "rlve/Integral", "params": task.params}
    assert (await grader(rf"\boxed{{{task.answer}}}", None, metadata)).correct is Correct.YES
    trace = tmp_path / "trace"
    verdict = await grader(f"<answer>open('{trace}', 'w').close() or x</answer>", None, metadata)
    assert (verdict.correct, verdict.format_ok) == (Correct.NO, False)
    assert not trace.exists()


@pytest.mark.parametrize("text", ["x**2/2 + sin(3*x)", "-exp(x)*log(x) + 2.5", "3*x1*(y - 2)", "sqrt(2)/2, 0", "pi*C"])
def test_formulas_are_formulas(text: str) -> None:
    assert is_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        "eval(chr(49))",
        "x.__class__",
        "sin(x).func",
        "x . y",
        "open('f')",
        "[x]",
        "a_b",
        "print(2)",
        "x" * 3000,
        "\uff45val(1)",
    ],
)
def test_programs_are_no_formulas(text: str) -> None:
    assert not is_formula(text)
