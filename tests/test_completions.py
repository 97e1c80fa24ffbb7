"""What is no answer is refused before it becomes a sample, whoever made it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfeed.completions import Limits, check_completion, check_sample, share_mask
from rollfeed.errors import EngineProtocolError
from rollfeed.protocols import RolloutRequest
from rollfeed.testing import sample_of
from rollfeed.types import (
    Completion,
    CompletionTimings,
    FinishKind,
    FinishReason,
    Prompt,
    RoutedExperts,
    Sample,
    SampleStatus,
    SamplingParams,
    VersionSpan,
)

LIMITS = Limits(vocab_size=100, context_length=64, newest_version=3)
PROMPT = Prompt(prompt_id="p", source="s", text="abc", token_ids=np.array([1, 2, 3], np.int32))
REQUEST = RolloutRequest(
    prompt=PROMPT,
    params=SamplingParams(max_new_tokens=8),
    group_index=5,
    index=21,
    rollout_id=21,
    step=0,
    max_context_length=64,
)


def completion(token_ids: list[int], *, kind: FinishKind = FinishKind.STOP, **changes: Any) -> Completion:
    count = len(token_ids)
    made = Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.full(count, -0.5, np.float32),
        text="",
        finish_reason=FinishReason(kind),
        version_spans=(VersionSpan(0, count, 3),) if count else (),
        precision="fp32",
        prompt_tokens=3,
        cached_tokens=0,
        timings=CompletionTimings(0.0, 0.0),
    )
    return replace(made, **changes)


def logprobs(*values: float) -> Any:
    return np.array(values, np.float32)


def check(made: Completion, *, num_prompt_tokens: int = 3, **changes: Any) -> None:
    check_completion(
        made, num_prompt_tokens=num_prompt_tokens, params=REQUEST.params, limits=replace(LIMITS, **changes)
    )


@pytest.mark.parametrize(
    "made",
    [
        completion([4, 99]),
        completion([], kind=FinishKind.ABORT),
        completion([4] * 8, kind=FinishKind.LENGTH),
        completion([4], logprobs=logprobs(0.0)),
        completion([4], logprobs=logprobs(1e-5)),
        completion([4], logprobs=logprobs(-90.0)),
        completion([4, 5], version_spans=(VersionSpan(0, 1, 0), VersionSpan(1, 2, 3))),
    ],
)
def test_what_can_be_an_answer_is_one(made: Completion) -> None:
    check(made)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (completion([4, 100]), "its token ids go from 4 to 100, out of a vocabulary of 100"),
        (completion([-1, 4]), "its token ids go from -1 to 4"),
        (completion([4], logprobs=logprobs(0.7)), "its logprobs go from 0.7 to 0.7"),
        (completion([4, 5], logprobs=logprobs(-1.0, 100.0)), "its logprobs go from -1 to 100"),
        (completion([4, 5], logprobs=logprobs(-1.0, -1e30)), "its logprobs go from -1e"),
        (completion([4, 5], logprobs=logprobs(-1.0, np.nan)), "its logprobs go from nan"),
        (completion([4], logprobs=logprobs(-np.inf)), "its logprobs go from -inf"),
        (completion([4], prompt_tokens=1), "answers 1 prompt tokens, 3 were sent"),
        (completion([4], version_spans=(VersionSpan(0, 1, 999),)), "of version 999, 3 is the newest"),
        (completion([4] * 3, kind=FinishKind.LENGTH), "ended for its length after 3 of 8 tokens"),
        (completion([4] * 9, kind=FinishKind.LENGTH), "9 tokens, 8 were asked for"),
        (completion([]), "stopped before its first token"),
    ],
)
def test_x11_to_x13_what_cannot_be_is_refused(made: Completion, said: str) -> None:
    with pytest.raises(EngineProtocolError) as caught:
        check(made)
    assert said in str(caught.value)


def test_a_response_may_be_cut_where_the_context_ends() -> None:
    made = completion([4] * 3, kind=FinishKind.LENGTH, prompt_tokens=58)
    check(made, num_prompt_tokens=58)
    with pytest.raises(EngineProtocolError, match="after 3 of 8"):
        check(replace(made, prompt_tokens=40), num_prompt_tokens=40)


def test_an_engine_that_tells_no_logprobs_may_do_so_and_no_other() -> None:
    made = completion([4, 5], logprobs=logprobs(np.nan, np.nan))
    check(made, is_exact=False)
    with pytest.raises(EngineProtocolError, match="nan"):
        check(made)


def sample(**changes: Any) -> Sample:
    made = Sample(
        token_ids=np.array([1, 2, 3, 7, 8], np.int32),
        response_length=2,
        loss_mask=np.array([1.0, 0.0], np.float32),
        logprobs=logprobs(-0.5, 0.0),
        version_spans=(VersionSpan(0, 2, 3),),
        status=SampleStatus.COMPLETED,
        group_index=5,
        index=21,
        rollout_id=21,
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logprobs": logprobs(-0.5, 7.0)},  # of a token that was inserted
        {"loss_mask": logprobs(0.5, 0.25)},
        {"token_ids": np.array([1, 2, 3, 4, 7, 8], np.int32)},  # a turn before it is part of its prompt
    ],
)
def test_a_sample_of_its_request_is_taken(changes: dict[str, Any]) -> None:
    check_sample(sample(**changes), REQUEST, limits=LIMITS)


def test_x15_a_sample_that_says_so_has_a_context_of_its_own() -> None:
    for ids in ([9, 4, 7, 8], [7, 8]):
        fork = {"token_ids": np.array(ids, np.int32)}
        check_sample(sample(**fork, metadata={"own_context": True}), REQUEST, limits=LIMITS)
        with pytest.raises(EngineProtocolError, match=r"do not begin with the prompt's; .* own_context = true"):
            check_sample(sample(**fork), REQUEST, limits=LIMITS)
    beyond = sample(token_ids=np.array([100, 7, 8], np.int32), metadata={"own_context": True})
    with pytest.raises(EngineProtocolError, match="its token ids go from 7 to 100"):
        check_sample(beyond, REQUEST, limits=LIMITS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": np.array([1, 2, 4, 7, 8], np.int32)}, "do not begin with the prompt's"),
        ({"token_ids": np.array([1, 2, 7, 8], np.int32)}, "do not begin with the prompt's"),
        ({"token_ids": np.array([1, 2, 3, 7], np.int32)}, "its response begins inside the prompt"),
        ({"token_ids": np.array([1, 2, 3, 7, 100], np.int32)}, "its token ids go from 7 to 100"),
        ({"token_ids": np.array([1, 2, 3, 7, -8], np.int32)}, "its token ids go from -8 to 7"),
        ({"logprobs": logprobs(0.7, 0.0)}, "its logprobs go from 0.7 to 0.7"),
        ({"logprobs": logprobs(np.nan, 0.0)}, "its logprobs go from nan"),
        ({"loss_mask": logprobs(2.0, 0.0)}, "its loss mask goes from 0 to 2, out of 0 to 1"),
        ({"loss_mask": logprobs(-1.0, 0.0)}, "its loss mask goes from -1 to 0"),
        ({"loss_mask": logprobs(np.nan, 0.0)}, "its loss mask goes from nan"),
        ({"rollout_id": 20}, "it is of rollout 20 in group 5, its request of 21 in 5"),
        ({"group_index": 4}, "it is of rollout 21 in group 4"),
        ({"version_spans": (VersionSpan(0, 2, 4),)}, "of version 4, 3 is the newest"),
    ],
)
def test_x15_a_sample_that_is_another_or_cannot_be_trained_on_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineProtocolError) as caught:
        check_sample(sample(**changes), REQUEST, limits=LIMITS)
    assert said in str(caught.value)


def test_masks_of_ones_are_one_array_that_nobody_can_write_to() -> None:
    first, second = share_mask(sample_of([1], [2, 3, 4])), share_mask(sample_of([1], [5]))
    assert first.loss_mask.tolist() == [1.0, 1.0, 1.0]
    assert first.loss_mask.base is second.loss_mask.base is not None
    with pytest.raises(ValueError, match="read-only"):
        first.loss_mask[0] = 0.0
    assert share_mask(first) is first


def test_other_masks_stay_as_they_are() -> None:
    partly = sample_of([1], [2, 3], loss_mask=np.array([1.0, 0.5], np.float32))
    assert share_mask(partly) is partly
    empty = share_mask(sample_of([1], []))
    assert empty.loss_mask.shape == (0,)


NUMBERS = st.floats(width=32) | st.sampled_from([0.0, 1.0, 1.0000001, -1e-45, 1e-3, -1000.0, np.nan, np.inf])
IDS = st.integers(-(2**31), 2**31 - 1) | st.sampled_from([0, 99, 100, 2**31 - 1, -1])


@given(st.lists(st.tuples(IDS, NUMBERS, NUMBERS), min_size=1, max_size=4))
def test_x15_no_sample_is_taken_that_cannot_be_trained_on(response: list[tuple[int, float, float]]) -> None:
    ids, told, mask = (list(column) for column in zip(*response, strict=True))
    made = sample(
        token_ids=np.array([1, 2, 3, *ids], np.int32),
        response_length=len(ids),
        loss_mask=logprobs(*mask),
        logprobs=logprobs(*told),
        version_spans=(VersionSpan(0, len(ids), 3),),
    )
    weights, values = made.loss_mask, made.logprobs
    can_be = all(0 <= each < 100 for each in ids) and bool(((weights >= 0.0) & (weights <= 1.0)).all())
    can_be = can_be and bool(((values >= -1000.0) & (values.astype(np.float64) <= 1e-3))[weights > 0.0].all())
    try:
        check_sample(made, REQUEST, limits=LIMITS)
    except EngineProtocolError:
        assert not can_be
    else:
        assert can_be


@given(st.integers(-5, 70), st.integers(-1, 9), st.integers(0, 2**40))
def test_x12_no_answer_to_another_prompt_or_of_an_unknown_version_is_taken(
    prompt_tokens: int, num_tokens: int, version: int
) -> None:
    spans = (VersionSpan(0, max(0, num_tokens), version),) if num_tokens > 0 else ()
    kind = FinishKind.LENGTH if num_tokens == 8 else FinishKind.STOP
    made = completion([4] * max(0, num_tokens), kind=kind, prompt_tokens=prompt_tokens, version_spans=spans)
    is_true = prompt_tokens == 3 and 0 < num_tokens <= 8 and version <= 3
    try:
        check(made)
    except EngineProtocolError:
        assert not is_true
    else:
        assert is_true


def test_experts_are_asked_of_answers_that_have_ended() -> None:
    """One that was aborted goes on from its tokens, whose experts come with the rest."""
    params = replace(REQUEST.params, return_routed_experts=True)

    def check_experts(made: Completion) -> None:
        check_completion(made, num_prompt_tokens=3, params=params, limits=LIMITS)

    check_experts(completion([4, 5], kind=FinishKind.ABORT))
    with pytest.raises(EngineProtocolError, match="no routed_experts, which sampling"):
        check_experts(completion([4, 99]))
    check_experts(completion([4, 99], routed_experts=RoutedExperts.of(np.zeros((4, 2), np.int64))))
    with pytest.raises(EngineProtocolError, match="routed_experts of 3 tokens, where 4 were computed"):
        check_experts(completion([4, 99], routed_experts=RoutedExperts.of(np.zeros((3, 2), np.int64))))
