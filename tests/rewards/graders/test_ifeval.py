from __future__ import annotations

from typing import Any

import pytest

from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.registry import BUILTIN_GRADERS
from rollfeed.types import Outcome, Verdict


def grade(response: str, *instructions: tuple[str, Any], rm_type: str = "ifeval") -> Verdict:
    metadata = {
        "instruction_id_list": [name for name, _ in instructions],
        "kwargs": [arguments for _, arguments in instructions],
    }
    return BUILTIN_GRADERS[rm_type](response, "", metadata)


def test_every_instruction_has_to_be_followed() -> None:
    words, comma = ("length_constraints:number_words", {"num_words": 2}), ("punctuation:no_comma", {})
    assert grade("one two", words, comma).reward == 1.0
    verdict = grade("one, two", words, comma)
    assert verdict.reward == 0.0
    assert verdict.detail == "not followed: punctuation:no_comma"


def test_instruction_that_comes_twice_is_checked_twice() -> None:
    name = "length_constraints:number_words"
    assert grade("one two three", (name, {"num_words": 20}), (name, {"num_words": 2})).reward == 0.0


def test_unknown_instruction_gives_nothing_and_is_named() -> None:
    verdict = grade("Any text at all.", ("keywords:must_be_nice", {}))
    assert verdict.reward == 0.0
    assert "keywords:must_be_nice (unknown)" in verdict.detail


def test_arguments_that_are_null_count_as_missing() -> None:
    padded = {"num_words": 2, "relation": None, "keywords": None}
    assert grade("one two", ("length_constraints:number_words", padded)).reward == 1.0
    assert grade("one two", ("punctuation:no_comma", None)).reward == 1.0


def test_reasoning_does_not_count() -> None:
    assert grade("<think>one, two</think>\nthree", ("punctuation:no_comma", {})).reward == 1.0
    assert grade("<think>one two", ("punctuation:no_comma", {})).reward == 0.0


def test_loose_grader_forgives_what_surrounds_the_answer() -> None:
    lowercase = ("change_case:english_lowercase", {})
    response = "Sure, here it is:\nall small"
    assert grade(response, lowercase).reward == 0.0
    assert grade(response, lowercase, rm_type="ifeval_loose").reward == 1.0
    assert grade("Sure:\n*all small*\nBye", lowercase, rm_type="ifeval_loose").reward == 1.0
    assert grade("All\nNot\nSmall", lowercase, rm_type="ifeval_loose").reward == 0.0


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"instruction_id_list": []},
        {"instruction_id_list": "punctuation:no_comma"},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
        {"instruction_id_list": ["keywords:existence"], "kwargs": [{}]},
        {"instruction_id_list": ["keywords:existence"], "kwargs": ["rain"]},
    ],
)
def test_broken_instructions_are_an_error_not_a_zero(metadata: dict[str, Any]) -> None:
    verdict = BUILTIN_GRADERS["ifeval"]("Some text.", "", metadata)
    assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)


async def test_ifbench_is_a_name_of_ifeval_wherever_a_grader_is_named() -> None:
    names = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    for rm_type, response, reward in [
        ("ifbench", "no comma", 1.0),
        ("ifbench", "a, comma", 0.0),
        ("boxed_ifbench", r"a, \boxed{none}", 1.0),
        ("boxed_ifbench", r"\boxed{a, comma}", 0.0),
    ]:
        of_run = RewardHub(graders=BUILTIN_GRADERS, rm_type=rm_type, timeout_seconds=1.0)
        assert (await of_run.grade(response, None, metadata=names)).reward == reward
        of_row = RewardHub(graders=BUILTIN_GRADERS, timeout_seconds=1.0)
        assert (await of_row.grade(response, None, metadata={**names, "rm_type": rm_type})).reward == reward
        assert (await of_row.grade(response, None, rm_type=rm_type, metadata=names)).reward == reward
