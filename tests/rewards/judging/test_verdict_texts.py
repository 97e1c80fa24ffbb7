"""Verdicts are read as they are meant, or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.rewards.judging.conftest import completion

from rollfeed.config import JudgeSettings
from rollfeed.rewards.judging.verdict_texts import (
    JudgeCompletion,
    UnreadableVerdictError,
    read_ranking,
    read_score,
    verdict_tool,
)

Make = Callable[..., JudgeSettings]
YES_NO = {"yes": 1.0, "no": 0.0}
ABC = {"A": 1.0, "B": 0.5, "C": 0.0}


def reply_of(**reply: Any) -> JudgeCompletion:
    return JudgeCompletion.read(completion(reply))


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 7.0),
        ("It is clear.\n\n**Score: 7.5**", 7.5),
        ("Score: 8/10", 8.0),
        ("score = 8 out of 10.", 8.0),
        ("The score is 3.", 3.0),
        ("First I thought Score: 9. But then:\nScore: 2", 2.0),
        ('{"reason": "short", "score": 4}', 4.0),
        ("6", 6.0),
        ("I would give it 6.", 6.0),
        ("<think>Score: 1</think>Score: 9", 9.0),
        ("Score (0-10): 7", 7.0),
        ("**Score:** [[5]]", 5.0),
        ("Score: 0", 0.0),
    ],
)
def test_a_number_is_read(judge_settings: Make, text: str, score: float) -> None:
    assert read_score(reply_of(content=text), judge_settings()) == score


@pytest.mark.parametrize(
    "text",
    [
        "",
        "It is good.",
        "Between 6 and 8.",
        "Score: 11",
        "Score: -1",
        "Score: 85%",
        "Score: 3/5",
        "Score: 7-8",
        "Score: 7 to 8",
        "Score: 1,000",
        "Score: 1e9",
        "Score: 1.2.3",
        "Score: 9, or rather\nScore: 85%",
        "Score: N",
        "<think>Score: 7",
        "Score: nan",
        "Score: 9, or rather\nScore: \u20135",
        "\u20135",
        "Score: 9, or rather\nScore: .5",
    ],
)
def test_what_is_no_score_is_not_read_as_one(judge_settings: Make, text: str) -> None:
    with pytest.raises(UnreadableVerdictError):
        read_score(reply_of(content=text), judge_settings())


@pytest.mark.parametrize("text", ["Score: -5", "Score: \u22125", "\u22125", "Score: 9. Or rather\nScore: \u22125"])
def test_a_minus_is_read_in_either_form(judge_settings: Make, text: str) -> None:
    assert read_score(reply_of(content=text), judge_settings(score_range=(-10.0, 10.0))) == -5.0


def test_a_number_that_was_cut_off_is_not_read(judge_settings: Make) -> None:
    with pytest.raises(UnreadableVerdictError, match="cut off at max_tokens = 1024"):
        read_score(reply_of(content="Score: 1", finish="length"), judge_settings())


@pytest.mark.parametrize("finish", ["abort", "content_filter"])
def test_a_verdict_that_was_broken_off_is_not_read(judge_settings: Make, finish: str) -> None:
    with pytest.raises(UnreadableVerdictError, match=f"broken off: finish_reason = '{finish}'"):
        read_score(reply_of(content="Score: 1", finish=finish), judge_settings())


def test_of_a_reply_in_parts_the_texts_count(judge_settings: Make) -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "Score: 3"}]}
    assert read_score(reply_of(content=[thought, {"type": "text", "text": "7"}]), judge_settings()) == 7.0


@pytest.mark.parametrize(
    ("text", "choices", "score"),
    [
        ("A", ABC, 1.0),
        (" b.\n", ABC, 0.5),
        ("**C**", ABC, 0.0),
        ("[[B]]", ABC, 0.5),
        ("A is longer, but B is right. Verdict: B", ABC, 0.5),
        ("Answer: A. No, after all the answer is C", ABC, 0.0),
        ("B, because a short one is better", ABC, 0.5),
        ("<think>A</think>\nC", ABC, 0.0),
        ("A is better.", ABC, 1.0),
        ("A\n\nBecause it is right.", ABC, 1.0),
        ("B is better.", ABC, 0.5),
        ("Yes it has.", YES_NO, 1.0),
        ("No \u2013 there is none.", YES_NO, 0.0),
        ("Yes.", YES_NO, 1.0),
        ("No, it has none.", YES_NO, 0.0),
        ("Final answer: NO", YES_NO, 0.0),
    ],
)
def test_a_choice_is_read(judge_settings: Make, text: str, choices: Any, score: float) -> None:
    settings = judge_settings(reply="letter", choices=choices)
    assert read_score(reply_of(content=text), settings) == score


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("", ABC),
        ("A or B", ABC),
        ("The answer is a tie", ABC),
        ("It is a good one", ABC),
        ("D", ABC),
        ("I like B", ABC),
        ("A good answer, but it is wrong.", ABC),
        ("No idea.", YES_NO),
        ("Good question", {"good": 1.0, "bad": 0.0}),
        ("Answer: Absolutely", ABC),
        ("yes and no", YES_NO),
        ("Nothing", YES_NO),
        ("<think>A", ABC),
    ],
)
def test_what_is_no_choice_is_not_read_as_one(judge_settings: Make, text: str, choices: Any) -> None:
    with pytest.raises(UnreadableVerdictError):
        read_score(reply_of(content=text), judge_settings(reply="letter", choices=choices))


def test_probabilities_of_letters_weight_their_scores(judge_settings: Make) -> None:
    settings = judge_settings(reply="letter_logprobs", choices=ABC)
    tops = {"A": math.log(0.5), " B": math.log(0.25), "The": math.log(0.2), "a": math.log(0.05)}
    thought = [("A", {"A": 0.0}), ("</think>", {"</think>": 0.0}), ("\n\n", {"\n\n": 0.0})]
    for before in ([], thought):
        found = read_score(reply_of(content="A", tops=[*before, ("A", tops)], finish="length"), settings)
        assert found == pytest.approx((0.55 * 1.0 + 0.25 * 0.5) / 0.8)


@pytest.mark.parametrize(
    ("tops", "told"),
    [
        (None, "it has no logprobs"),
        ([("A", {})], "it has no top_logprobs"),
        ([("The", {"The": math.log(0.9), "A": math.log(0.1)})], "have 0.10 of the probability, with 'The' first"),
        ([("\n", {"\n": 0.0})], "no token after its thoughts"),
    ],
)
def test_letters_without_probabilities_are_not_read(judge_settings: Make, tops: Any, told: str) -> None:
    settings = judge_settings(reply="letter_logprobs", choices=ABC)
    with pytest.raises(UnreadableVerdictError, match=told):
        read_score(reply_of(content="A", **({} if tops is None else {"tops": tops})), settings)


@pytest.mark.parametrize(
    ("arguments", "choices", "score"),
    [('{"score": 7}', {}, 7.0), ('{"reason": "r", "score": 0.5}', {}, 0.5), ('{"score": "B"}', ABC, 0.5)],
)
def test_a_call_is_read_by_its_schema(judge_settings: Make, arguments: str, choices: Any, score: float) -> None:
    settings = judge_settings(reply="tool", choices=choices)
    assert read_score(reply_of(content=None, call=arguments), settings) == score
    schema = verdict_tool(settings)["function"]["parameters"]["properties"]["score"]
    assert schema == ({"type": "string", "enum": ["A", "B", "C"]} if choices else schema)


@pytest.mark.parametrize(
    "arguments", ["", "{", "[]", '{"score": "7"}', '{"score": true}', '{"score": 11}', '{"score": NaN}', '{"mark": 7}']
)
def test_a_call_that_breaks_its_schema_is_not_read(judge_settings: Make, arguments: str) -> None:
    with pytest.raises(UnreadableVerdictError):
        read_score(reply_of(content="Score: 7", call=arguments), judge_settings(reply="tool"))


def test_a_text_is_no_call(judge_settings: Make) -> None:
    with pytest.raises(UnreadableVerdictError, match="does not call verdict"):
        read_score(reply_of(content='{"score": 7}'), judge_settings(reply="tool"))


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("Ranking: 2 > 3 > 1", [2, 0, 1]),
        ("It was close.\n**Ranking:** 1 = 3 > 2", [0, 1, 0]),
        ("Ranking: 1 > 2 > 3\nNo:\nRanking: [3] > [1] > [2]", [1, 2, 0]),
    ],
)
def test_a_ranking_is_read(judge_settings: Make, text: str, ranks: Sequence[int]) -> None:
    assert read_ranking(reply_of(content=text), judge_settings(mode="listwise"), count=3) == ranks


@pytest.mark.parametrize(
    "text", ["", "Ranking: 1 > 2", "Ranking: 1 > 2 > 2", "Ranking: 1 > 2 > 4", "Ranking: 1 2 3", "1 > 2 > 3"]
)
def test_a_ranking_that_is_not_whole_is_not_read(judge_settings: Make, text: str) -> None:
    with pytest.raises(UnreadableVerdictError):
        read_ranking(reply_of(content=text), judge_settings(mode="listwise"), count=3)


@pytest.mark.parametrize(
    "body", [None, [], {}, {"choices": []}, {"choices": [{"message": "hi"}]}, {"error": "overloaded"}]
)
def test_what_is_no_completion_is_no_verdict(body: Any) -> None:
    with pytest.raises(UnreadableVerdictError, match="no chat completion"):
        JudgeCompletion.read(json.loads(json.dumps(body)))
