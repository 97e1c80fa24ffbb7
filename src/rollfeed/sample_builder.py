"""The only place where tokens are appended to a sample.

Invariant: token ids, loss mask, logprobs, sampling masks and version spans grow together, and sampled text is never
tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollfeed.protocols import OWN_CONTEXT, RolloutRequest
from rollfeed.types import (
    Completion,
    FinishKind,
    Picture,
    RoutedExperts,
    Sample,
    SampleStatus,
    SamplingMask,
    VersionSpan,
)

STATUS_OF: dict[FinishKind, SampleStatus] = {
    FinishKind.STOP: SampleStatus.COMPLETED,
    FinishKind.LENGTH: SampleStatus.TRUNCATED,
    FinishKind.ABORT: SampleStatus.ABORTED,
}
"""What an engine's finish reason makes of a sample."""


class _AppendedTokens(NamedTuple):
    """All but the ids of tokens that came at once, ``(R,)`` each."""

    loss_mask: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    sampling_mask: SamplingMask | None


class SampleBuilder:
    """One sample in the making; starts from the prompt, or from what an aborted execution left.

    Args:
        request: What is asked.
        context_ids: The tokens ``(P,)`` that it starts from instead of the prompt's, in a rollout of several samples.
        num_spent: Tokens of the response's budget that other samples of the rollout have taken.
        context_images: Pictures in those tokens.

    Raises:
        ValueError: If a partial sample does not begin with the request's prompt.
    """

    def __init__(
        self,
        request: RolloutRequest,
        *,
        context_ids: NDArray[np.int32] | None = None,
        num_spent: int = 0,
        context_images: Sequence[Picture] = (),
    ) -> None:
        partial = request.partial
        prompt_ids = request.prompt.token_ids if context_ids is None else context_ids
        self._request = request
        self._metadata = request.prompt.metadata
        if context_ids is not None:
            self._metadata = {**self._metadata, OWN_CONTEXT: True}
        self._num_spent = num_spent
        self._num_prompt_tokens = len(prompt_ids)
        self._token_ids: list[NDArray[np.int32]] = [prompt_ids]
        self._pieces: list[_AppendedTokens] = []
        self._spans: list[VersionSpan] = []
        self._cached_tokens = 0
        self._precisions = ""
        self._routed_experts: RoutedExperts | None = None
        self.response_length = 0
        self.images: tuple[Picture, ...] = request.prompt.images if context_ids is None else tuple(context_images)
        """Pictures among its tokens so far, in their order."""
        if partial is not None:
            self.images = partial.images
            if not np.array_equal(partial.token_ids[: partial.prompt_length], prompt_ids):
                raise ValueError(
                    f"partial sample {partial.index} does not begin with prompt {request.prompt.prompt_id}"
                )
            ids, mask = partial.response_token_ids, partial.sampling_mask
            self._append(ids, partial.loss_mask, partial.logprobs, partial.version_spans, mask)
            self._cached_tokens = partial.cached_tokens
            self._note_precision(partial.precision)
            self._routed_experts = partial.routed_experts

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Prompt and response so far, not to be written to. ``(P + R,)``."""
        if len(self._token_ids) > 1:
            self._token_ids = [np.concatenate(self._token_ids)]
        return self._token_ids[0]

    @property
    def num_spent(self) -> int:
        """Tokens of the response's budget that are taken."""
        return self._num_spent + self.response_length

    @property
    def remaining_budget(self) -> int:
        """Tokens that may still be sampled: within the response length and the context, never negative."""
        in_response = self._request.params.max_new_tokens - self.num_spent
        in_context = self._request.max_context_length - self._num_prompt_tokens - self.response_length
        return max(0, min(in_response, in_context))

    def append_completion(self, completion: Completion) -> None:
        """Append what an engine sampled, with its logprobs and versions; all of it is trained on."""
        mask = np.ones(len(completion.token_ids), np.float32)
        self._append(
            completion.token_ids, mask, completion.logprobs, completion.version_spans, completion.sampling_mask
        )
        self._routed_experts = RoutedExperts.joined([self._routed_experts, completion.routed_experts])
        self._cached_tokens += completion.cached_tokens
        if len(completion.token_ids):
            self._note_precision(completion.precision)

    def append_inserted(
        self,
        token_ids: NDArray[np.int32],
        *,
        policy_version: int,
        loss_mask: NDArray[np.float32] | None = None,
        images: Sequence[Picture] = (),
    ) -> None:
        """Append tokens that were not sampled, such as a tool's output; ``loss_mask`` says which are trained on.

        ``images`` are pictures that have their places in them.
        """
        self.images = (*self.images, *images)
        nothing = np.zeros(len(token_ids), np.float32)
        spans = [VersionSpan(0, len(token_ids), policy_version)] if len(token_ids) else []
        self._append(token_ids, nothing if loss_mask is None else loss_mask, nothing, spans)

    def build(self, status: SampleStatus, *, response: str) -> Sample:
        """Return the sample as it stands."""
        request = self._request
        return Sample(
            token_ids=self.token_ids,
            response_length=self.response_length,
            loss_mask=_joined([piece.loss_mask for piece in self._pieces]),
            logprobs=_joined([piece.logprobs for piece in self._pieces]),
            version_spans=tuple(self._spans),
            status=status,
            group_index=request.group_index,
            index=request.index,
            rollout_id=request.rollout_id,
            response=response,
            label=request.prompt.label,
            metadata=self._metadata,
            images=self.images,
            cached_tokens=self._cached_tokens,
            precision=self._precisions,
            sampling_mask=SamplingMask.joined(
                [piece.sampling_mask or SamplingMask.without(len(piece.logprobs)) for piece in self._pieces]
            )
            if request.params.return_sampling_mask
            else None,
            routed_experts=self._routed_experts,
        )

    def _note_precision(self, joined: str) -> None:
        if joined != self._precisions:
            self._precisions = "+".join(sorted({*self._precisions.split("+"), *joined.split("+")} - {""}))

    def _append(
        self,
        token_ids: NDArray[np.int32],
        loss_mask: NDArray[np.float32],
        logprobs: NDArray[np.float32],
        spans: Sequence[VersionSpan],
        sampling_mask: SamplingMask | None = None,
    ) -> None:
        if not len(token_ids) == len(loss_mask) == len(logprobs) == sum(span.end - span.start for span in spans):
            raise ValueError(
                f"{len(token_ids)} tokens, {len(loss_mask)} mask weights, {len(logprobs)} logprobs and spans "
                f"{list(spans)} do not belong together"
            )
        self._token_ids.append(np.asarray(token_ids, np.int32))
        self._pieces.append(
            _AppendedTokens(np.asarray(loss_mask, np.float32), np.asarray(logprobs, np.float32), sampling_mask)
        )
        for span in spans:
            self._add_span(self.response_length + span.start, self.response_length + span.end, span.policy_version)
        self.response_length += len(token_ids)

    def _add_span(self, start: int, end: int, policy_version: int) -> None:
        if self._spans and self._spans[-1].policy_version == policy_version:
            start = self._spans.pop().start
        self._spans.append(VersionSpan(start, end, policy_version))


def _joined(arrays: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return the arrays as one; the only one as it is, unless it is a view that keeps more than itself in memory."""
    if len(arrays) == 1 and arrays[0].base is None:
        return arrays[0]
    return np.concatenate([*arrays, np.empty(0, np.float32)])
