from __future__ import annotations

import numpy as np
import pytest

from rollfeed.types import (
    Completion,
    CompletionTimings,
    FinishKind,
    FinishReason,
    SamplingMask,
    SamplingParams,
    VersionSpan,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", -2),
        ("min_new_tokens", -1),
        ("repetition_penalty", 0.0),
    ],
)
def test_a_sampling_parameter_out_of_range_is_named(name, value) -> None:
    with pytest.raises(ValueError, match=f"^{name} = {value}: must be"):
        SamplingParams(**{"max_new_tokens": 1, name: value})


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop: an empty string would stop everything"):
        SamplingParams(max_new_tokens=1, stop=("",))


def test_greedy_and_zero_tokens_are_legal() -> None:
    params = SamplingParams(max_new_tokens=0, temperature=0.0)
    assert (params.max_new_tokens, params.temperature) == (0, 0.0)


@pytest.mark.parametrize(
    ("num_ids", "num_logprobs", "spans"),
    [(3, 2, (VersionSpan(0, 3, 0),)), (3, 3, (VersionSpan(0, 2, 0),)), (3, 3, ()), (0, 0, (VersionSpan(0, 1, 0),))],
)
def test_a_completion_whose_lengths_differ_is_refused(num_ids, num_logprobs, spans) -> None:
    with pytest.raises(ValueError, match=r"token ids but|version spans"):
        Completion(
            token_ids=np.zeros(num_ids, np.int32),
            logprobs=np.zeros(num_logprobs, np.float32),
            text="",
            finish_reason=FinishReason(FinishKind.STOP),
            version_spans=spans,
            precision="fp32",
            prompt_tokens=1,
            cached_tokens=0,
            timings=CompletionTimings(0.0, 0.0),
        )


def test_a_sampling_mask_keeps_rows_of_any_length_side_by_side() -> None:
    rows = [[3, 1], [], [7], [2, 9, 4]]
    mask = SamplingMask.of(rows)
    assert [each.tolist() for each in mask.split()] == rows
    assert mask.positions.tolist() == [0, 0, 2, 3, 3, 3]
    assert [each.tolist() for each in mask.at(np.array([0, 3])).split()] == [[3, 1], [2, 9, 4]]
    joined = SamplingMask.joined([mask, SamplingMask.without(2), SamplingMask.of([[5]])])
    assert [each.tolist() for each in joined.split()] == [*rows, [], [], [5]]
    mask.check(np.array([1, 8, 7, 9], np.int32))


@pytest.mark.parametrize("tokens", [[2, 8, 7, 9], [1, 8, 7], [1, 8, 9, 9]])
def test_a_token_outside_its_sampling_mask_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="sampling mask"):
        SamplingMask.of([[3, 1], [], [7], [2, 9, 4]]).check(np.array(tokens, np.int32))


def test_a_sampling_mask_whose_lengths_do_not_add_up_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens are not 3 by its lengths"):
        SamplingMask(np.array([1, 2], np.int32), np.array([4, 5], np.int32))
