"""The environments that ask in sentences or in few characters."""

from __future__ import annotations

import pytest

from rollfeed.environments import make_task, with_parameters
from rollfeed.environments.builtin import (
    CloseBrackets,
    LookupTable,
    MakeTarget,
    ModChain,
    NextInPattern,
    SortNumbers,
)
from rollfeed.environments.builtin.arithmetic import evaluate
from rollfeed.environments.builtin.styled import StyledQuestion
from rollfeed.types import Correct, Verdict

STYLED = [CloseBrackets(), LookupTable(), MakeTarget(), ModChain(), NextInPattern(), SortNumbers()]


@pytest.mark.parametrize("environment", STYLED, ids=lambda env: env.environment_id)
def test_compact_problems_are_the_same_in_few_characters(environment: StyledQuestion) -> None:
    compact = with_parameters(environment, {"style": "compact"})  # type: ignore[arg-type]
    for level in (0, 5, 12):
        long, short = (make_task(each, level=level, index=1, run_seed=4) for each in (environment, compact))  # type: ignore[arg-type]
        assert len(short.question) < len(long.question)
        assert short.question.endswith("=")
        assert short.answer == str(long.answer).replace(" ", "")
        assert {**short.params, "style": "chat"} == long.params
        for response in (f"{short.answer}\n17", f" {short.answer}<|im_end|>"):
            assert compact.verify(short.params, response).correct is Correct.YES
        for response in (f"So {short.answer}8", f"17\n{short.answer}", "", short.question):
            assert compact.verify(short.params, response).correct is Correct.NO, response


def test_repeated_question_is_no_answer_and_what_follows_it_is() -> None:
    for environment in STYLED:
        task = make_task(environment, level=2, index=0, run_seed=0)  # type: ignore[arg-type]
        assert environment.verify(task.params, task.question).format_ok is False  # type: ignore[attr-defined]
        verdict = environment.verify(task.params, f"{task.question}\n{task.answer}")  # type: ignore[attr-defined]
        assert verdict.correct is Correct.YES


def test_long_lines_of_few_characters_are_read_once() -> None:
    for environment in STYLED:
        compact = with_parameters(environment, {"style": "compact"})  # type: ignore[arg-type]
        task = make_task(compact, level=2, index=0, run_seed=0)
        for response in ("-" * 1_000_000, "( " * 500_000, "1" * 1_000_000):
            assert compact.verify(task.params, response).correct is Correct.NO


def ordered(response: str) -> Verdict:
    return SortNumbers().verify({"numbers": [31, 5, 17], "style": "chat"}, response)


@pytest.mark.parametrize("response", ["5, 17, 31", "5 17 31", "5 < 17 < 31", "Sorted:\n**5, 17, 31**.", "[5,17,31]"])
def test_numbers_in_order_are_found(response: str) -> None:
    assert ordered(response).correct is Correct.YES


def test_order_earns_more_the_more_is_in_place_and_less_where_numbers_change() -> None:
    nothing, changed, reverse, right = (ordered(each).reward for each in ("none", "5, 9, 31", "31, 17, 5", "5, 17, 31"))
    assert nothing == 0.0 < changed == reverse < right == 1.0  # type: ignore[operator]
    assert ordered("5, 17, 31, 31").correct is Correct.NO


def test_brackets_are_closed_alone_or_with_the_whole_text() -> None:
    params = {"text": "([]<(", "missing": ")>)", "style": "chat"}

    def reward(response: str) -> float:
        return CloseBrackets().verify(params, response).reward  # type: ignore[return-value]

    assert reward(")>)") == reward("([]<()>)") == reward("The rest is: ) > )") == 1.0
    assert 0.0 == reward("none") == reward(">>)") < reward(")))") < reward(")>)]") < 1.0


def made(response: str) -> Verdict:
    return MakeTarget().verify({"numbers": [3, 4, 2], "target": 10, "style": "chat"}, response)


@pytest.mark.parametrize(
    "response",
    ["3 * 4 - 2", "(4\u00d73)\u22122 = 10", "\\boxed{3 \\times 4 - 2}", "No: 3 + 4 = 7\nAnswer: 3*4-2", "-2 + 3 * 4"],
)
def test_any_expression_of_the_numbers_with_the_value_is_right(response: str) -> None:
    assert made(response).correct is Correct.YES


@pytest.mark.parametrize(
    "response",
    ["10", "5 * 2", "3 * 4 - 2 - 0", "3 ** 4", "4 / (3 - 3) + 2", "3 * 4 - 2 + 0 * 2", "10 = 3 + 4", "9**9**9**9 - 1"],
)
def test_other_expressions_are_not(response: str) -> None:
    assert made(response).correct is Correct.NO


def test_expression_earns_more_with_the_numbers_and_more_the_nearer_it_is() -> None:
    others, far, near = (made(each).reward for each in ("5 + 5", "3 * 4 * 2", "3 + 4 + 2"))
    assert 0.0 < others < far < near < 1.0  # type: ignore[operator]


@pytest.mark.parametrize(
    "text", ["2**3", "2//3", "__import__('os')", "1/0", "(" * 200 + "1", "1" * 301, "007", "3 4", "", "1.5"]
)
def test_arithmetic_is_nothing_else(text: str) -> None:
    with pytest.raises(ValueError, match=r"it |only"):
        evaluate(text)


def test_sequence_keeps_its_steps() -> None:
    for level in range(21):
        task = make_task(NextInPattern(), level=level, index=3, run_seed=1)
        shown = [int(each) for each in task.question.partition(": ")[2].partition(", ...")[0].split(", ")]
        period = 1 + level // 3
        steps = [after - before for before, after in zip(shown, [*shown[1:], task.params["answer"]], strict=True)]
        if level < 4:
            assert all(step == steps[at % period] for at, step in enumerate(steps))
        growth = {after - before for before, after in zip(steps, steps[period:], strict=False)}
        assert len(growth) == 1
        assert len(shown) == 2 * period + 2


def test_table_leads_to_the_number() -> None:
    for level in (0, 7, 13, 23):
        task = make_task(LookupTable(), level=level, index=0, run_seed=1)
        *rows, question, _ = task.question.splitlines()
        table, word = dict(row.split(" = ") for row in rows), question.removesuffix("?").rpartition(" ")[2]
        for _ in range(1 + level // 6):
            word = table[word]
        assert word == task.answer
        assert LookupTable().verify(task.params, ", ".join(table.values())).correct is Correct.NO


def test_chain_has_its_remainder() -> None:
    for level in (0, 5, 30):
        task = make_task(ModChain(), level=level, index=0, run_seed=1)
        told = task.question.partition(".")[0].removeprefix("Start with ").split(", ")
        value = int(told[0])
        for step in told[1:]:
            number = int(step.rpartition(" ")[2])
            value = value + number if step.startswith("add") else value * number
        assert value % task.params["modulus"] == task.params["answer"]
        assert len(told) == level + 2
