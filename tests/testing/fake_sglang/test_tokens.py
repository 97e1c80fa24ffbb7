"""Prepared tokens and their JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rollfeed.testing.fake_sglang.tokens import Output, Response, explicit_output, find_response, token_pool


def decoded(output: Output) -> tuple[list[int], list[list[float]], str]:
    ids, triples = (json.loads(b"[" + b"".join(parts) + b"]") for parts in (output.ids, output.triples))
    return ids, triples, json.loads(b'"' + b"".join(output.text) + b'"')


@pytest.mark.parametrize(
    ("start", "num_tokens"), [(0, 0), (0, 1), (5, 1000), (65_530, 20), (65_536 + 7, 3), (9, 70_000)]
)
def test_slices_of_the_pool_are_its_tokens_round_and_round(start: int, num_tokens: int) -> None:
    pool = token_pool()
    output = pool.output(start, num_tokens)
    ids, triples, text = decoded(output)
    expected = np.take(pool.token_ids, np.arange(start, start + num_tokens), mode="wrap").tolist()
    logprobs = np.take(pool.logprobs, np.arange(start, start + num_tokens), mode="wrap").tolist()
    assert output.num_tokens == num_tokens
    assert ids == expected
    assert triples == [[logprob, token, None] for logprob, token in zip(logprobs, expected, strict=True)]
    assert len(text) == 2 * num_tokens


def test_a_token_is_about_forty_bytes() -> None:
    output = token_pool().output(100, 10_000)
    size = sum(len(part) for parts in (output.ids, output.triples, output.text) for part in parts)
    assert 36 <= size / 10_000 <= 44


def test_all_logprobs_are_possible() -> None:
    logprobs = token_pool().logprobs
    assert np.isfinite(logprobs).all()
    assert (logprobs <= 0).all()


def test_given_tokens_keep_their_values_and_text() -> None:
    output = explicit_output([5, 2], [-0.25, -1.5], 'said "hi"\n')
    assert decoded(output) == ([5, 2], [[-0.25, 5, None], [-1.5, 2, None]], 'said "hi"\n')


@pytest.mark.parametrize("length", [1, 2, 3, 500, 26_000])
def test_pieces_of_a_response_make_the_whole(length: int) -> None:
    response = Response.of(length)
    whole, _, text = decoded(response.output(0, length))
    assert (len(whole), whole[-1]) == (length, 2)
    for cut in {0, 1, length // 2, length - 1, length}:
        first, second = decoded(response.output(0, cut)), decoded(response.output(cut, length))
        assert first[0] + second[0] == whole
        assert first[2] + second[2] == text


@pytest.mark.parametrize("length", [2, 3, 500, 26_000])
def test_an_unfinished_response_is_found_behind_any_prompt(length: int) -> None:
    response = Response.of(length)
    prompt = [1, 30_000, 45_000, 2, 21_000]
    for cut in {1, 2, length // 2, length - 1} - {0, length}:
        ids = [*prompt, *decoded(response.output(0, cut))[0]]
        assert find_response(np.array(ids, np.int32)) == (response, cut)


def test_prompts_without_a_response_have_none() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        assert find_response(np.append(random.integers(0, 49_152, 300), 198).astype(np.int32)) is None
    ended = decoded(Response.of(50).output(0, 50))[0]
    assert find_response(np.array([1, *ended, 198], np.int32)) is None
