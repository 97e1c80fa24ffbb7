"""Functions of users say by the names of their parameters what they want."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rollfeed.errors import RewardError
from rollfeed.rewards.by_name import Takes, by_name
from rollfeed.rewards.rows import row_prompt, row_rollout
from rollfeed.types import Prompt, Sample

METADATA = {"level": "easy"}


def asked(response: str = "4<|im_end|>") -> tuple[Sample, Prompt]:
    return row_rollout(response, "4", METADATA).samples[0], row_prompt("2 + 2?", "4", METADATA)


def called(function: Any, takes: Takes = Takes.SAMPLE) -> Any:
    sample, prompt = asked()
    made = by_name(function, takes=takes, label_names=["answer"])
    match takes:
        case Takes.SAMPLE:
            return made(sample, prompt)
        case Takes.SAMPLES:
            return made([sample, sample], [prompt, prompt])
        case Takes.GROUP:
            return made([sample, sample], prompt)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda response: response, "4"),
        (lambda label, response: (label, response), ("4", "4")),
        (lambda response, *, metadata: metadata, METADATA),
        (lambda response, level: level, "easy"),
        (lambda response, answer: answer, "4"),
        (lambda response, other=7: other, 7),
        (lambda response, **rest: sorted(rest), ["answer", "label", "level", "metadata", "prompt", "sample"]),
        (lambda prompt, sample: (prompt.text, sample.response), ("2 + 2?", "4<|im_end|>")),
        (lambda sample: sample.response, "4<|im_end|>"),
        (partial(lambda response, label, bonus: bonus, bonus=2), 2),
    ],
)
def test_a_function_gets_what_its_parameters_name(function: Any, expected: Any) -> None:
    assert called(function) == expected


def samples_and_prompt(samples: Sequence[Sample], prompt: Prompt) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (lambda sample, prompt: 0.0, Takes.SAMPLE),
        (lambda one, other: 0.0, Takes.SAMPLE),
        (lambda samples, prompts: 0.0, Takes.SAMPLES),
        (samples_and_prompt, Takes.GROUP),
        (lambda *args: 0.0, Takes.SAMPLE),
        (max, Takes.SAMPLE),
        (3, Takes.SAMPLE),
    ],
)
def test_a_function_whose_parameters_name_nothing_is_as_it_was(function: Any, takes: Takes) -> None:
    assert by_name(function, takes=takes) is function


def test_a_function_of_completions_gets_lists() -> None:
    def reward(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[Any]:
        return [[prompts[0], completions[0], answer[0], columns["level"][0], columns["completion_ids"][0]]] * len(
            prompts
        )

    expected = ["2 + 2?", "4", "4", "easy", []]
    assert called(reward) == expected
    assert called(reward, Takes.SAMPLES) == [expected, expected]
    assert called(reward, Takes.GROUP) == [expected, expected]


def test_messages_are_messages_in_completions_too() -> None:
    sample, _ = asked("four")
    prompt = row_prompt([{"role": "user", "content": "2 + 2?"}], "4", METADATA)
    made = by_name(lambda prompts, completions: [(prompts[0], completions[0])], takes=Takes.SAMPLE)
    assert made(sample, prompt) == (
        [{"role": "user", "content": "2 + 2?"}],
        [{"role": "assistant", "content": "four"}],
    )


def test_what_no_row_has_is_told_with_a_remedy() -> None:
    with pytest.raises(RewardError, match=r"asks for 'levl', which this row has not: did you mean level\?.*label_key"):
        called(lambda response, levl: 0.0)
    with pytest.raises(RewardError, match=r"returned 0\.5 for one completion; it must be a list of one reward"):
        called(lambda completions: 0.5)


def test_an_array_is_a_list_of_rewards() -> None:
    assert called(lambda completions: np.full(len(completions), 0.5)) == 0.5


async def test_async_functions_stay_async() -> None:
    async def reward(response: str, label: str) -> float:
        return float(response == label)

    made = by_name(reward, takes=Takes.SAMPLE)
    assert inspect.iscoroutinefunction(made)
    assert await made(*asked()) == 1.0


def test_lists_have_what_a_generate_function_knows_of_a_sample() -> None:
    sample, prompt = asked()
    made = by_name(lambda completions, turns: turns, takes=Takes.GROUP)
    told = [replace(sample, metadata={**METADATA, "turns": number}) for number in (1, 2)]
    assert made(told, prompt) == [1, 2]
