"""What every environment has to promise, checked on all built-in ones."""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfeed.environments import make_task
from rollfeed.environments.builtin import BUILTIN_ENVIRONMENTS
from rollfeed.protocols import Environment, MultiTurnEnvironment, Task
from rollfeed.types import Correct, Verdict

LEVELS = range(9)

every_environment = pytest.mark.parametrize("environment", BUILTIN_ENVIRONMENTS, ids=lambda env: env.environment_id)


def tasks_of(environment: Environment, *, per_level: int = 20) -> list[Task]:
    levels = [*LEVELS, environment.max_level or 50]
    return [
        make_task(environment, level=level, index=index, run_seed=11) for level in levels for index in range(per_level)
    ]


def judge(environment: Environment, task: Task, response: str) -> Verdict:
    verdict = environment.verify(task.params, response)
    assert isinstance(verdict.reward, float)
    assert 0.0 <= verdict.reward <= 1.0
    assert (verdict.reward == 1.0) is (verdict.correct is Correct.YES)
    return verdict


@every_environment
def test_known_answer_is_right_however_it_is_marked(environment: Environment) -> None:
    for task in tasks_of(environment):
        answer = task.answer
        assert answer is not None
        responses = [
            answer,
            f"  {answer}\n",
            f"\\boxed{{{answer}}}",
            f"<answer>{answer}</answer>",
            f"Let me see.\nAnswer: {answer}",
            f"The answer is: {answer}",
            f"<think>Is it 17, 42 or \\boxed{{3}}?</think>{answer}",
        ]
        assert [r for r in responses if judge(environment, task, r).correct is not Correct.YES] == [], task.question


@every_environment
def test_what_is_no_answer_is_never_right(environment: Environment) -> None:
    for task in tasks_of(environment):
        for response in ["", " \n", "0", "I do not know.", "?!", task.question, f"<think>{task.answer}", "\\boxed{}"]:
            if response != task.answer:
                assert judge(environment, task, response).correct is Correct.NO, (response, task.question)


@every_environment
def test_what_holds_no_answer_earns_nothing(environment: Environment) -> None:
    for task in tasks_of(environment, per_level=2):
        for response in ["", " \n", f"<think>{task.answer}", "\\boxed{}", "<answer></answer>"]:
            verdict = judge(environment, task, response)
            assert (verdict.reward, verdict.format_ok, verdict.extracted) == (0.0, False, None)


@every_environment
@given(
    response=st.text() | st.text(alphabet='0123456789.,-/ \n{}\\"<>=:') | st.binary().map(lambda b: b.decode("latin-1"))
)
def test_verifier_takes_any_text(environment: Environment, response: str) -> None:
    for level in (0, 9):
        task = make_task(environment, level=level, index=0, run_seed=0)
        judge(environment, task, response)
        judge(environment, task, f"\\boxed{{{response}}}")
        judge(environment, task, f"Answer: {response}")


@every_environment
def test_verdicts_survive_a_json_round_trip_of_the_parameters(environment: Environment) -> None:
    for task in tasks_of(environment, per_level=5):
        stored = json.loads(json.dumps(task.params))
        for response in [str(task.answer), "0", "17", "the river is a stone", task.question]:
            assert environment.verify(stored, response) == environment.verify(task.params, response)


@every_environment
def test_global_random_state_is_left_alone(environment: Environment) -> None:
    before, numpy_before = random.getstate(), np.random.get_state()[1].copy()
    for task in tasks_of(environment, per_level=2):
        judge(environment, task, str(task.answer))
    assert random.getstate() == before
    assert (np.random.get_state()[1] == numpy_before).all()


@every_environment
def test_tasks_of_a_level_differ(environment: Environment) -> None:
    for level in LEVELS:
        tasks = [make_task(environment, level=level, index=index, run_seed=0) for index in range(50)]
        least = min(25, 3 << level) if tasks[0].hidden else 25
        assert len({task.identity for task in tasks}) >= least, level


@every_environment
def test_no_single_answer_is_right_too_often(environment: Environment) -> None:
    for level in LEVELS:
        tasks = [make_task(environment, level=level, index=index, run_seed=3) for index in range(200)]
        _, times = Counter(task.answer for task in tasks).most_common(1)[0]
        assert times <= 0.5 * len(tasks), level


@every_environment
def test_harder_levels_ask_for_short_answers_still(environment: Environment) -> None:
    for task in tasks_of(environment, per_level=3):
        assert len(task.answer or "") <= 160
        assert len(task.question) <= 1_500


@every_environment
def test_verifier_copes_with_long_and_hostile_text(environment: Environment) -> None:
    # Milliseconds each: time that is quadratic in the response would show here as minutes.
    hostile = [
        "9" * 100_000,
        "1," * 50_000,
        "\\boxed{" * 20_000,
        "answer " * 20_000,
        "<answer>" * 20_000,
        '"' * 100_000,
        "\u0327\u0301" * 50_000,
        "\ufdfa" * 100_000,
        "1/" * 50_000,
        "a " * 50_000,
        "is " * 40_000,
        " " * 100_000 + "x",
        "-" * 100_000,
        "calc:" + " " * 1_000_000 + "x",
    ]
    task = make_task(environment, level=8, index=0, run_seed=0)
    for response in hostile:
        judge(environment, task, response)
        if isinstance(environment, MultiTurnEnvironment):
            environment.step(environment.start(task.params), response)
