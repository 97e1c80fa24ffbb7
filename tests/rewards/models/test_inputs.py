from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollfeed.config.reward_model import RewardModelSettings, ScoredUnit
from rollfeed.errors import RewardError
from rollfeed.prompts.tokenizer import LocalTokenizer
from rollfeed.rewards.models.inputs import InputBuilder, ScoredText
from rollfeed.testing import CharTokenizer, make_prompt, sample_of
from rollfeed.types import Picture, Sample, SampleStatus


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


class TemplateOf(CharTokenizer):
    """A chat template that shows answers as a function makes them, and marks their ends."""

    def __init__(self, shown: Callable[[str], str]) -> None:
        self.shown = shown

    def render_chat(self, messages: Any, *, add_generation_prompt: bool = True, **_: Any) -> str:
        turns = "".join(f"<{each['role']}>{self.shown(each['content'])}<end>" for each in messages)
        return turns + ("<assistant>" if add_generation_prompt else "")


def scored_text(found: ScoredText) -> str:
    return "".join(chr(found.token_ids[place]) for place in found.places)


def in_a_chat(shown: Callable[[str], str], response: str, **settings: Any) -> ScoredText:
    tokenizer = TemplateOf(shown)
    builder = InputBuilder(RewardModelSettings(**settings), tokenizer, takes_sampled_ids=False, max_length=None)
    prompt = make_prompt("q", messages=({"role": "user", "content": "q"},))
    return builder.build(sample_of([1], [2], response=response), prompt)


@pytest.mark.parametrize("response", ["d", "<assistant>", "cde"])
def test_a_response_is_scored_where_it_stands_and_not_in_the_mark_of_its_end(response: str) -> None:
    found = in_a_chat(str, response, unit=ScoredUnit.TOKEN)
    assert scored_text(found) == response
    assert found.places[0] == len("<user>q<end><assistant>")


def test_places_are_right_where_a_template_strips_answers() -> None:
    found = in_a_chat(str.strip, "\nab;;cd\n", unit=ScoredUnit.TOKEN)
    assert scored_text(found) == "ab;;cd"
    found = in_a_chat(str.strip, "\nab;;cd\n", unit=ScoredUnit.STEP, step_separator=";;")
    assert scored_text(found) == ";d"


def test_a_template_that_changes_answers_leaves_no_places_to_score() -> None:
    def shown(text: str) -> str:
        return text.rpartition("</think>")[2]

    with pytest.raises(RewardError, match="shows the response otherwise"):
        in_a_chat(shown, "ab</think>cd", unit=ScoredUnit.TOKEN)
    assert in_a_chat(shown, "ab</think>cd").text.endswith("<assistant>cd<end>")


def test_pictures_are_refused_and_not_left_out(policy_tokenizer: LocalTokenizer) -> None:
    picture = Picture(content_hash="0" * 64, media_type="image/png", width=1, height=1)
    builder = InputBuilder(RewardModelSettings(), policy_tokenizer, takes_sampled_ids=True, max_length=None)
    with pytest.raises(RewardError, match="takes text only"):
        builder.build(sample_of([3], [4], images=(picture,)), make_prompt("a"))
