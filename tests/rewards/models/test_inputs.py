from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollfeed.config.reward_model import RewardModelSettings, ScoredUnit
from rollfeed.errors import RewardError
from rollfeed.prompts.tokenizer import LocalTokenizer
from rollfeed.rewards.models.inputs import InputBuilder, ScoredText
from rollfeed.testing import make_prompt, sample_of
from rollfeed.types import Sample, SampleStatus


def sample_like(tokenizer: LocalTokenizer, prompt: str, response: str, *, ended: bool = True) -> Sample:
    prompt_ids, ids = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, response))
    ids = np.append(ids, np.int32(0)) if ended else ids
    status = SampleStatus.COMPLETED if ended else SampleStatus.TRUNCATED
    return sample_of(prompt_ids, ids, response=response + ("<end>" if ended else ""), status=status)


def build(tokenizer: LocalTokenizer, response: str, *, ids: bool, ended: bool = True, **settings: Any) -> ScoredText:
    max_length = settings.pop("max_length", None)
    builder = InputBuilder(RewardModelSettings(**settings), tokenizer, takes_sampled_ids=ids, max_length=max_length)
    sample = sample_like(tokenizer, "ab", response, ended=ended)
    return builder.build(sample, make_prompt("ab", token_ids=sample.token_ids[:2]))


def test_sampled_ids_and_their_text_are_the_same_input(policy_tokenizer: LocalTokenizer) -> None:
    for ended in (True, False):
        by_ids = build(policy_tokenizer, "cde", ids=True, ended=ended)
        by_text = build(policy_tokenizer, "cde", ids=False, ended=ended)
        assert by_ids.token_ids == by_text.token_ids
        assert by_ids.places == by_text.places == (len(by_ids.token_ids) - 1,)
        assert len(by_ids.token_ids) == (6 if ended else 5)
    assert (by_ids.text, by_text.text) == ("", "abcde")


@pytest.mark.parametrize(
    ("response", "places"),
    [
        ("cd;;ef;;gh", [5, 9, 12]),
        ("cd;;ef;;", [5, 10]),
        ("cd", [4]),
        ("cd;;;;ef", [7, 10]),
        (";;cd", [6]),
    ],
)
def test_a_step_is_scored_where_its_separator_ends_and_the_last_at_the_end(
    policy_tokenizer: LocalTokenizer, response: str, places: list[int]
) -> None:
    found = build(policy_tokenizer, response, ids=True, unit=ScoredUnit.STEP, step_separator=";;")
    assert list(found.places) == places


def test_steps_of_a_text_are_scored_at_the_same_characters(policy_tokenizer: LocalTokenizer) -> None:
    found = build(policy_tokenizer, "cd;;ef;;gh", ids=False, unit=ScoredUnit.STEP, step_separator=";;")
    assert list(found.places) == [5, 9, 11]


def test_a_step_token_takes_the_place_of_separators_and_is_scored(policy_tokenizer: LocalTokenizer) -> None:
    found = build(policy_tokenizer, "cd;;ef;;gh", ids=False, unit=ScoredUnit.STEP, step_separator=";;", step_token=".")
    assert found.text == "abcd.ef.gh."
    dot = int(policy_tokenizer.encode(".", add_special_tokens=False)[0])
    assert [found.token_ids[place] for place in found.places] == [dot] * 3


def test_every_token_of_the_response_is_scored(policy_tokenizer: LocalTokenizer) -> None:
    assert build(policy_tokenizer, "cde", ids=True, unit=ScoredUnit.TOKEN).places == (2, 3, 4, 5)
    assert build(policy_tokenizer, "cde", ids=False, unit=ScoredUnit.TOKEN).places == (2, 3, 4)
    assert build(policy_tokenizer, "", ids=False, unit=ScoredUnit.TOKEN).places == (2,)


def test_a_text_that_is_too_long_is_refused_and_not_cut(policy_tokenizer: LocalTokenizer) -> None:
    with pytest.raises(RewardError, match="have 6 tokens, and the reward model takes 5"):
        build(policy_tokenizer, "cde", ids=True, max_length=5)
