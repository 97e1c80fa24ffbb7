from __future__ import annotations

import numpy as np
import pytest

from rollfeed.engine.backends.requests import Request
from rollfeed.testing.prompts import END_OF_TURN, CharTokenizer
from rollfeed.types import Completion, FinishKind, FinishReason, SamplingParams, VersionSpan

TOKENIZER = CharTokenizer()


def sample(text: str, params: SamplingParams, *, context_length: int = 100) -> tuple[Completion, int]:
    """Append the characters one by one until the request ends; return it and how many were taken."""
    request = Request(
        request_id="r",
        prompt_ids=np.array([65, 66], np.int32),
        params=params,
        eos_token_ids=TOKENIZER.eos_token_ids,
        context_length=context_length,
    )
    for taken, character in enumerate(text, start=1):
        request.append(ord(character), -0.5, policy_version=taken // 3)
        reason = request.finish_reason(TOKENIZER)
        if reason is not None:
            request.finish(reason, TOKENIZER, precision="fp32")
            return request.reply.result(), taken
    request.finish(FinishReason(FinishKind.ABORT), TOKENIZER, precision="fp32")
    return request.reply.result(), len(text)


END = chr(END_OF_TURN)


def test_an_eos_token_ends_and_is_part_of_the_completion() -> None:
    completion, taken = sample(f"hi{END}more", SamplingParams(max_new_tokens=10))
    assert taken == 3
    assert completion.finish_reason == FinishReason(FinishKind.STOP, END_OF_TURN)
    assert completion.text == f"hi{END}"
    assert completion.token_ids.tolist() == [104, 105, END_OF_TURN]
    assert len(completion.logprobs) == 3


@pytest.mark.parametrize("changes", [{"no_stop_trim": False}, {"skip_special_tokens": True}])
def test_the_stop_token_can_be_left_out_of_the_text(changes: dict[str, bool]) -> None:
    completion, _ = sample(f"hi{END}", SamplingParams(max_new_tokens=10, **changes))
    assert completion.text == "hi"
    assert len(completion.token_ids) == 3


def test_stop_token_ids_come_in_addition() -> None:
    completion, taken = sample("abc", SamplingParams(max_new_tokens=10, stop_token_ids=(98,)))
    assert (taken, completion.finish_reason.matched) == (2, 98)


def test_a_stop_string_over_several_tokens_ends_the_text_right_behind_it() -> None:
    completion, taken = sample("one END two", SamplingParams(max_new_tokens=20, stop=("X", "END")))
    assert (taken, completion.finish_reason.matched) == (7, "END")
    assert completion.text == "one END"


def test_a_stop_string_is_trimmed_on_request() -> None:
    completion, _ = sample("one END two", SamplingParams(max_new_tokens=20, stop=("END",), no_stop_trim=False))
    assert completion.text == "one "
    assert len(completion.token_ids) == 7


class WordTokenizer(CharTokenizer):
    """One token is several characters."""

    def decode(self, token_ids: object, *, skip_special_tokens: bool) -> str:
        words = {1: "ab", 2: "cd\nef", 3: "", 4: "x\n\ny"}
        return "".join(words[int(token)] for token in token_ids)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tokens", "stop", "taken", "text"),
    [
        ([1, 2, 1], "bc", 2, "abc"),
        ([1, 2, 1], "\n", 2, "abcd\n"),
        ([1, 3, 3, 2], "bcd", 4, "abcd"),
        ([4, 4], "\n\n", 1, "x\n\n"),
        ([1, 1], "zz", 2, "abab"),
    ],
)
def test_stop_strings_are_found_inside_and_across_tokens(tokens: list[int], stop: str, taken: int, text: str) -> None:
    request = Request(
        request_id="r",
        prompt_ids=np.array([1], np.int32),
        params=SamplingParams(max_new_tokens=len(tokens), stop=(stop,)),
        eos_token_ids=(),
        context_length=100,
    )
    for count, token in enumerate(tokens, start=1):
        request.append(token, 0.0, policy_version=0)
        reason = request.finish_reason(WordTokenizer())
        if reason is not None:
            request.finish(reason, WordTokenizer(), precision="fp32")
            assert count == taken
            assert request.reply.result().text == text
            return
    pytest.fail("the request did not end")


def test_stop_strings_are_not_looked_for_before_min_new_tokens() -> None:
    params = SamplingParams(max_new_tokens=20, min_new_tokens=4, stop=(".",))
    completion, taken = sample("a.b.c", params)
    assert (taken, completion.text) == (4, "a.b.")
    completion, taken = sample("a..bc.", params)
    assert (taken, completion.text) == (6, "a..bc.")


def test_max_new_tokens_and_the_context_end_with_length() -> None:
    completion, taken = sample("abcdef", SamplingParams(max_new_tokens=3))
    assert (taken, completion.finish_reason) == (3, FinishReason(FinishKind.LENGTH))
    completion, taken = sample("abcdef", SamplingParams(max_new_tokens=30), context_length=6)
    assert (taken, completion.finish_reason) == (4, FinishReason(FinishKind.LENGTH))


def test_an_eos_token_that_is_also_the_last_allowed_one_counts_as_stop() -> None:
    completion, _ = sample(f"ab{END}", SamplingParams(max_new_tokens=3))
    assert completion.finish_reason.kind is FinishKind.STOP


def test_version_spans_follow_the_version_of_each_token() -> None:
    completion, _ = sample("abcdefg", SamplingParams(max_new_tokens=7))
    assert completion.version_spans == (VersionSpan(0, 2, 0), VersionSpan(2, 5, 1), VersionSpan(5, 7, 2))


def test_requests_without_a_seed_get_different_ones() -> None:
    seeds = {
        Request(
            request_id="r",
            prompt_ids=np.array([1], np.int32),
            params=SamplingParams(max_new_tokens=1),
            eos_token_ids=(),
            context_length=9,
        ).seed
        for _ in range(20)
    }
    assert len(seeds) == 20
