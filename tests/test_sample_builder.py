import json
from dataclasses import replace

import numpy as np
import pytest

from rollfeed.protocols import RolloutRequest
from rollfeed.sample_builder import SampleBuilder
from rollfeed.testing import make_prompt
from rollfeed.types import (
    Completion,
    CompletionTimings,
    FinishKind,
    FinishReason,
    RoutedExperts,
    Sample,
    SampleStatus,
    SamplingMask,
    SamplingParams,
    VersionSpan,
)


def request(*, budget: int = 10, context: int = 1000, partial: Sample | None = None) -> RolloutRequest:
    return RolloutRequest(
        prompt=make_prompt("abc"),
        params=SamplingParams(max_new_tokens=budget),
        group_index=2,
        index=9,
        rollout_id=9,
        step=0,
        max_context_length=context,
        partial=partial,
    )


def completion(
    ids: list[int], *, version: int = 0, kind: FinishKind = FinishKind.STOP, precision: str = "fp32"
) -> Completion:
    return Completion(
        token_ids=np.array(ids, np.int32),
        logprobs=-np.array(ids, np.float32),
        text="x" * len(ids),
        finish_reason=FinishReason(kind),
        version_spans=(VersionSpan(0, len(ids), version),) if ids else (),
        precision=precision,
        prompt_tokens=3,
        cached_tokens=1,
        timings=CompletionTimings(0.0, 0.0),
    )


def test_ids_mask_logprobs_and_spans_grow_together() -> None:
    builder = SampleBuilder(request())
    builder.append_completion(completion([5, 6], version=3))
    builder.append_inserted(np.array([70, 71, 72], np.int32), policy_version=3)
    builder.append_completion(completion([7], version=4))
    sample = builder.build(SampleStatus.COMPLETED, response="r")
    assert sample.response_token_ids.tolist() == [5, 6, 70, 71, 72, 7]
    assert sample.loss_mask.tolist() == [1, 1, 0, 0, 0, 1]
    assert sample.logprobs.tolist() == [-5, -6, 0, 0, 0, -7]
    assert sample.version_spans == (VersionSpan(0, 5, 3), VersionSpan(5, 6, 4))
    assert sample.prompt_length == 3
    assert (sample.group_index, sample.index, sample.rollout_id) == (2, 9, 9)


def test_r09_a_resumed_sample_keeps_old_logprobs_and_names_each_version() -> None:
    first = SampleBuilder(request())
    first.append_completion(completion([1, 2, 3, 4], version=3, kind=FinishKind.ABORT))
    first.append_completion(completion([], version=3, kind=FinishKind.ABORT))
    partial = first.build(SampleStatus.ABORTED, response="")
    second = SampleBuilder(request(partial=partial))
    second.append_completion(completion([11, 12, 13, 14, 15, 16], version=4))
    sample = second.build(SampleStatus.COMPLETED, response="")
    assert sample.logprobs.tolist() == [-1, -2, -3, -4, -11, -12, -13, -14, -15, -16]
    assert sample.version_spans == (VersionSpan(0, 4, 3), VersionSpan(4, 10, 4))


def test_the_budget_is_within_response_and_context_and_never_negative() -> None:
    builder = SampleBuilder(request(budget=10))
    builder.append_completion(completion([1, 2, 3, 4]))
    assert builder.remaining_budget == 6
    assert SampleBuilder(request(budget=10, context=5)).remaining_budget == 2
    assert SampleBuilder(request(budget=10, context=2)).remaining_budget == 0


def test_a_partial_sample_of_another_prompt_is_refused() -> None:
    builder = SampleBuilder(request())
    builder.append_completion(completion([1]))
    partial = builder.build(SampleStatus.ABORTED, response="")
    other = RolloutRequest(
        prompt=make_prompt("xyz"),
        params=SamplingParams(max_new_tokens=10),
        group_index=2,
        index=9,
        rollout_id=9,
        step=0,
        max_context_length=1000,
        partial=partial,
    )
    with pytest.raises(ValueError, match="does not begin with prompt"):
        SampleBuilder(other)


def test_a_sample_holds_at_most_sixteen_bytes_a_token() -> None:
    builder = SampleBuilder(request(budget=100_000, context=200_000))
    builder.append_completion(completion(list(range(100_000))))
    sample = builder.build(SampleStatus.COMPLETED, response="")
    held = sample.token_ids.nbytes + sample.loss_mask.nbytes + sample.logprobs.nbytes
    assert held <= 16 * 100_003


def test_a_sample_keeps_no_more_in_memory_than_its_own_arrays() -> None:
    builder = SampleBuilder(request())
    logprobs = np.zeros(1000, np.float32)[:2]
    builder.append_completion(replace(completion([5, 6]), logprobs=logprobs))
    sample = builder.build(SampleStatus.COMPLETED, response="r")
    assert sample.logprobs.base is None
    assert sample.loss_mask.base is None
    assert sample.token_ids.base is None


def test_a_sample_carries_the_precision_it_was_sampled_in() -> None:
    builder = SampleBuilder(request())
    assert builder.build(SampleStatus.ABORTED, response="").precision == ""
    builder.append_completion(completion([], precision="bf16"))
    builder.append_completion(completion([5], precision="int8"))
    begun = builder.build(SampleStatus.ABORTED, response="r")
    assert begun.precision == "int8"
    resumed = SampleBuilder(request(partial=begun))
    resumed.append_completion(completion([6], precision="fp32"))
    resumed.append_completion(completion([7], precision="int8+fp32"))
    assert resumed.build(SampleStatus.COMPLETED, response="r").precision == "fp32+int8"


def test_tokens_keep_the_experts_that_they_were_sampled_with() -> None:
    """A turn's reply tells those of all before it anew: computed again, with other weights, they may be others."""
    asked = replace(request(), params=SamplingParams(max_new_tokens=10, return_routed_experts=True))
    builder = SampleBuilder(asked)
    length = len(builder.token_ids)
    assert builder.build(SampleStatus.ABORTED, response="").routed_experts is None

    def told(num_tokens: int, expert: int) -> RoutedExperts:
        return RoutedExperts.of(np.full((num_tokens, 4), expert))

    builder.append_completion(replace(completion([5, 6]), routed_experts=told(length + 1, 1)))
    builder.append_inserted(np.array([70], np.int32), policy_version=0)
    partial = builder.build(SampleStatus.ABORTED, response="r")
    resumed = SampleBuilder(replace(asked, partial=partial))
    resumed.append_completion(completion([]))
    resumed.append_completion(replace(completion([7]), routed_experts=told(length + 3, 300)))
    sample = resumed.build(SampleStatus.COMPLETED, response="r")
    assert sample.routed_experts is not None
    assert (partial.routed_experts.width, sample.routed_experts.width) == (1, 2)
    assert sample.routed_experts.numbers[:, 0].tolist() == [1] * (length + 1) + [300] * 2
    with pytest.raises(ValueError, match="3 choices a token go on from 4"):
        resumed.append_completion(replace(completion([8]), routed_experts=RoutedExperts.of(np.zeros((9, 3), int))))


def test_what_tokens_were_drawn_from_is_kept_over_turns_and_resumed_responses() -> None:
    asked = replace(request(), params=SamplingParams(max_new_tokens=10, return_sampling_mask=True))
    builder = SampleBuilder(asked)
    builder.append_completion(replace(completion([5, 6]), sampling_mask=SamplingMask.of([[5, 1], [6]])))
    builder.append_inserted(np.array([70], np.int32), policy_version=0)
    partial = builder.build(SampleStatus.ABORTED, response="r")
    resumed = SampleBuilder(replace(asked, partial=partial))
    resumed.append_completion(replace(completion([7]), sampling_mask=SamplingMask.of([[2, 7]])))
    sample = resumed.build(SampleStatus.COMPLETED, response="r")
    assert sample.sampling_mask is not None
    assert [each.tolist() for each in sample.sampling_mask.split()] == [[5, 1], [6], [], [2, 7]]
    read = Sample.from_dict(json.loads(json.dumps(sample.to_dict(), default=list)))
    assert read.to_dict() == sample.to_dict()
    assert SampleBuilder(request()).build(SampleStatus.COMPLETED, response="").sampling_mask is None
