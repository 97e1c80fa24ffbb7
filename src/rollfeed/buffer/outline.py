"""What is left in memory of rollouts that are on the disk, and how much memory the whole ones take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollfeed.types import PromptDraw, Rollout, Sample

_SAMPLE_BYTES = 2000
"""About what a sample takes besides its arrays and texts, its outline included."""


def num_bytes(draw: PromptDraw) -> int:
    """Return about how much memory a draw's rollouts take."""
    return sum(_sample_bytes(sample) for rollout in draw.rollouts for sample in rollout.samples)


def outline(draw: PromptDraw) -> PromptDraw:
    """Return the draw with rollouts that have the same statuses, lengths, versions and rewards, but no contents.

    Tokens are -1, logprobs NaN and masks 0, in arrays that take no memory; text and metadata are empty.
    """
    return draw._replace(rollouts=tuple(_rollout(rollout) for rollout in draw.rollouts))


def _rollout(rollout: Rollout) -> Rollout:
    return replace(rollout, samples=tuple(_sample(sample) for sample in rollout.samples))


def _sample(sample: Sample) -> Sample:
    length = sample.response_length
    return replace(
        sample,
        token_ids=np.broadcast_to(np.int32(-1), (len(sample.token_ids),)),
        loss_mask=np.broadcast_to(np.float32(0.0), (length,)),
        logprobs=np.broadcast_to(np.float32(np.nan), (length,)),
        sampling_mask=None,
        response="",
        metadata={},
        extra={},
    )


def _sample_bytes(sample: Sample) -> int:
    arrays = sample.token_ids.nbytes + sample.loss_mask.nbytes + sample.logprobs.nbytes
    if (mask := sample.sampling_mask) is not None:
        arrays += mask.lengths.nbytes + mask.token_ids.nbytes
    # Metadata is of any depth; its text is about as long as it is large.
    texts = len(sample.response) + sum(len(repr(part)) for part in (sample.metadata, sample.extra) if part)
    return arrays + texts + _SAMPLE_BYTES
