"""Checks of sampled tokens before they become a sample, whoever made them.

Servers, engines and users' functions are not believed: what one of them says wrong would be trained on without a word.

Axes: P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import EngineProtocolError, PictureMismatchError
from rollfeed.protocols import OWN_CONTEXT, RolloutRequest
from rollfeed.types import (
    Completion,
    FinishKind,
    FinishReason,
    Picture,
    PlaceholderRange,
    RoutedExperts,
    Sample,
    SamplingParams,
    SeenPicture,
    VersionSpan,
)

LARGEST_VOCABULARY = 2**31
_LARGEST_LOGPROB = 1e-3
"""What rounding makes of a probability of 1."""
_LOWEST_LOGPROB = -1000.0
"""float32 has no probability below the exponential of -104, so that nothing is sampled there."""
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_ONES = np.ones(1 << 15, np.float32)
_ONES.setflags(write=False)
_CONTEXT_SLACK = 8
"""Tokens that an engine may leave free at the end of its context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of an engine's tokens."""

    vocab_size: int = LARGEST_VOCABULARY
    context_length: int
    newest_version: int
    """Of the policy that has been published so far."""
    is_exact: bool = True
    """Whether logprobs are told; NaN are accepted where they are not."""


def check_tokens(
    token_ids: NDArray[np.integer],
    logprobs: NDArray[np.floating],
    *,
    vocab_size: int = LARGEST_VOCABULARY,
    is_exact: bool = True,
) -> None:
    """Check R sampled tokens, ``(R,)`` each.

    Raises:
        EngineProtocolError: If an id is not of the vocabulary, or a log-probability is none.
    """
    _check_ids(token_ids, vocab_size=vocab_size)
    _check_logprobs(logprobs, is_exact=is_exact)


def _check_ids(token_ids: NDArray[np.integer], *, vocab_size: int) -> None:
    # As unsigned numbers the negative ones are the largest, so that one pass finds either.
    if len(token_ids) and token_ids.view(_UNSIGNED[token_ids.itemsize]).max() >= vocab_size:
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        raise EngineProtocolError(f"its token ids go from {lowest} to {highest}, out of a vocabulary of {vocab_size}")


def _check_logprobs(logprobs: NDArray[np.floating], *, is_exact: bool) -> None:
    if not len(logprobs) or (not is_exact and np.isnan(logprobs).all()):
        return
    least, most = float(logprobs.min()), float(logprobs.max())
    if not _LOWEST_LOGPROB <= least <= most <= _LARGEST_LOGPROB:  # not so either where one is NaN
        raise EngineProtocolError(
            f"its logprobs go from {least:g} to {most:g}; a logarithm of a probability is at most 0"
        )


def check_finish(
    finish: FinishReason, *, num_prompt_tokens: int, num_tokens: int, max_new_tokens: int, context_length: int
) -> None:
    """Check that a response ended where its reason says.

    A stop is taken without the token or text that it stopped at: servers end at ids that only they know, and not all
    name what they found. Whoever knows more checks that, too.

    Raises:
        EngineProtocolError: If it is too long, was cut before its limit, or stopped at nothing.
    """
    if num_tokens > max_new_tokens:
        raise EngineProtocolError(f"{num_tokens} tokens, {max_new_tokens} were asked for")
    is_full = num_prompt_tokens + num_tokens >= context_length - _CONTEXT_SLACK
    if finish.kind is FinishKind.LENGTH and num_tokens < max_new_tokens and not is_full:
        raise EngineProtocolError(
            f"ended for its length after {num_tokens} of {max_new_tokens} tokens: let the server hold "
            f"{context_length} tokens of a request"
        )
    if finish.kind is FinishKind.STOP and not num_tokens:
        raise EngineProtocolError("stopped before its first token, where a sampled stop token must be told")


def check_versions(spans: tuple[VersionSpan, ...], *, newest_version: int) -> None:
    """Raise EngineProtocolError where tokens are of a version that has not been published."""
    if spans and (told := max(span.policy_version for span in spans)) > newest_version:
        raise EngineProtocolError(f"tokens of version {told}, {newest_version} is the newest that was published")


def check_completion(
    completion: Completion,
    *,
    num_prompt_tokens: int,
    params: SamplingParams,
    limits: Limits,
    images: Sequence[Picture] = (),
) -> None:
    """Check what an engine answered to P prompt tokens, those of its pictures included.

    Raises:
        EngineProtocolError: If it cannot be the answer; says what is wrong.
        PictureMismatchError: If it says that it has seen other pictures.
    """
    if images and completion.seen_pictures is not None:
        check_hashes(completion.seen_pictures, images)
    if completion.prompt_tokens != num_prompt_tokens:
        raise EngineProtocolError(f"answers {completion.prompt_tokens} prompt tokens, {num_prompt_tokens} were sent")
    check_tokens(completion.token_ids, completion.logprobs, vocab_size=limits.vocab_size, is_exact=limits.is_exact)
    # One that was aborted goes on from its tokens, whose experts come with the rest.
    is_whole = completion.finish_reason.kind is not FinishKind.ABORT
    if params.return_routed_experts and len(completion.token_ids) and is_whole:
        check_experts(completion.routed_experts, num_tokens=num_prompt_tokens + len(completion.token_ids) - 1)
    check_versions(completion.version_spans, newest_version=limits.newest_version)
    check_finish(
        completion.finish_reason,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=len(completion.token_ids),
        max_new_tokens=params.max_new_tokens,
        context_length=limits.context_length,
    )


def check_experts(routed: RoutedExperts | None, *, num_tokens: int) -> None:
    """Raise EngineProtocolError unless there are experts of so many tokens."""
    if routed is None:
        raise EngineProtocolError(
            "no routed_experts, which sampling.return_routed_experts asks for: the engine's model has no experts, or "
            "its server does not return them; set it to false"
        )
    if routed.num_tokens != num_tokens:
        raise EngineProtocolError(f"routed_experts of {routed.num_tokens} tokens, where {num_tokens} were computed")


def check_hashes(seen: Sequence[SeenPicture], sent: Sequence[Picture]) -> None:
    """Check that an engine has seen the pictures that it was sent; an empty hash says nothing.

    Raises:
        PictureMismatchError: If there are others, more or fewer; names the first, what was sent and what was seen.
    """
    if len(seen) != len(sent):
        raise PictureMismatchError(f"the engine has seen {len(seen)} pictures, and {len(sent)} were sent")
    for number, (told, own) in enumerate(zip(seen, sent, strict=True), start=1):
        if told.content_hash not in ("", own.content_hash):
            raise PictureMismatchError(
                f"picture {number}, {own.source or own.content_hash[:12]}: the engine has seen {told.content_hash[:12]}"
                f"..., and {own.content_hash[:12]}... was sent"
            )


def check_places(seen: Sequence[SeenPicture], places: Sequence[PlaceholderRange]) -> None:
    """Check that an engine has seen pictures in the places that they have; raises as :func:`check_hashes`."""
    for number, (told, place) in enumerate(zip(seen, places, strict=True), start=1):
        if (told.start, told.end) != place:
            raise PictureMismatchError(
                f"picture {number}: the engine has seen it in tokens {told.start} to {told.end}, and its place is "
                f"{place.start} to {place.end}: it was made larger or smaller, or is missing"
            )


def check_sample(sample: Sample, request: RolloutRequest, *, limits: Limits) -> None:
    """Check a sample that a generate function or a hook returned for its rollout.

    The sample is of the request's rollout, and begins with its prompt unless the metadata says ``own_context``. Its
    loss mask may have any weights from 0 to 1, and its tokens without weight any logprobs.

    Raises:
        EngineProtocolError: If it cannot be trained on; says what is wrong.
    """
    prompt_ids = request.prompt.token_ids
    if (sample.rollout_id, sample.group_index) != (request.rollout_id, request.group_index):
        raise EngineProtocolError(
            f"it is of rollout {sample.rollout_id} in group {sample.group_index}, its request of {request.rollout_id} "
            f"in {request.group_index}"
        )
    has_prompt = not sample.metadata.get(OWN_CONTEXT)
    if has_prompt and not np.array_equal(sample.token_ids[: len(prompt_ids)], prompt_ids):
        raise EngineProtocolError(
            "its token ids do not begin with the prompt's; a sample with another context has "
            f"{OWN_CONTEXT} = true in its metadata"
        )
    if has_prompt and sample.prompt_length < len(prompt_ids):
        raise EngineProtocolError("its response begins inside the prompt")
    mask = sample.loss_mask
    least, most = (float(mask.min()), float(mask.max())) if len(mask) else (1.0, 1.0)
    if not 0.0 <= least <= most <= 1.0:
        raise EngineProtocolError(f"its loss mask goes from {least:g} to {most:g}, out of 0 to 1")
    _check_ids(sample.response_token_ids if has_prompt else sample.token_ids, vocab_size=limits.vocab_size)
    trained = sample.logprobs if least > 0.0 else sample.logprobs[mask > 0.0]
    _check_logprobs(trained, is_exact=limits.is_exact)
    check_versions(sample.version_spans, newest_version=limits.newest_version)


def freeze(sample: Sample) -> Sample:
    """Return a sample whose arrays nobody can write to any more."""
    for array in (sample.token_ids, sample.loss_mask, sample.logprobs, sample.teacher_logprobs):
        if array is not None:
            array.setflags(write=False)
    if sample.sampling_mask is not None:
        for array in (sample.sampling_mask.lengths, sample.sampling_mask.token_ids):
            array.setflags(write=False)
    if sample.routed_experts is not None:
        sample.routed_experts.content.setflags(write=False)
    return sample


def share_mask(sample: Sample) -> Sample:
    """Return a sample whose loss mask is that of others where all of it is 1: a third of what a sample takes."""
    length = sample.response_length
    if length > len(_ONES) or sample.loss_mask.base is _ONES or not (sample.loss_mask == 1.0).all():
        return sample
    return replace(sample, loss_mask=_ONES[:length])
