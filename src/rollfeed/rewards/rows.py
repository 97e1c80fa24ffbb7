"""A response without a rollout, as functions that score samples take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollfeed.protocols import RewardFn
from rollfeed.rewards.calls import OwnPace
from rollfeed.types import Prompt, Rollout, Sample, SampleStatus

_NO_TOKENS = np.empty(0, np.int32)
_NO_NUMBERS = np.empty(0, np.float32)


def row_prompt(text: Any, label: Any, metadata: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a row: a text, or a list of messages; it has no tokens."""
    is_text = isinstance(text, str)
    messages = tuple(text) if isinstance(text, list) and all(isinstance(one, Mapping) for one in text) else None
    return Prompt(
        prompt_id="row",
        source="row",
        text=text if is_text else "",
        token_ids=_NO_TOKENS,
        messages=messages,
        label=label,
        metadata=metadata,
    )


def row_rollout(response: str, label: Any, metadata: Mapping[str, Any]) -> Rollout:
    """Return the rollout of a row: one finished sample with a text and without tokens."""
    sample = Sample(
        token_ids=_NO_TOKENS,
        response_length=0,
        loss_mask=_NO_NUMBERS,
        logprobs=_NO_NUMBERS,
        version_spans=(),
        status=SampleStatus.COMPLETED,
        group_index=0,
        index=0,
        rollout_id=0,
        response=response,
        label=label,
        metadata=metadata,
    )
    return Rollout(rollout_id=0, samples=(sample,))


def row_sample(response: str, label: Any, metadata: Mapping[str, Any], prompt: Any) -> tuple[Sample, Prompt]:
    """Return a single response as what scores samples takes."""
    return row_rollout(response, label, metadata).samples[0], row_prompt(prompt, label, metadata)


def as_grader(function: RewardFn | OwnPace) -> Any:
    """Return the grader that scores by a function of samples."""

    def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Any:
        prompt = row_prompt(metadata.get("prompt_text"), label, metadata)
        return function(row_rollout(response, label, metadata).samples[0], prompt)

    return OwnPace(grade) if isinstance(function, OwnPace) else grade
