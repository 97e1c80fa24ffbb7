"""One sample as it was found, of which nothing is believed.

Axes: P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollfeed.lint.findings import SamplePlace
from rollfeed.protocols import OWN_CONTEXT
from rollfeed.types import Prompt, SampleStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A sample, or the text of one; None stands for what its format does not say."""

    place: SamplePlace
    token_ids: NDArray[np.int32] | None = None
    """Prompt and response. ``(P + R,)``."""
    response_length: int = 0
    loss_mask: NDArray[np.float32] | None = None
    """``(R,)``, as are the logprobs; lengths may differ."""
    logprobs: NDArray[np.float32] | None = None
    spans: Sequence[tuple[int, int, int]] | None = None
    """Start, end and policy version."""
    versions: Sequence[int] = ()
    """One a turn, where there are no spans."""
    newest_version: int | None = None
    """That was published when the batch was cut."""
    max_staleness: int | None = None
    status: SampleStatus | None = None
    prompt: Prompt | None = None
    rollout: Hashable = None
    """What the samples of one rollout share; None where nobody knows."""
    is_removed: bool = False
    is_taught: bool = False
    """Whether nothing of it was sampled: the answer is the data set's."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    has_rounded_logprobs: bool = False
    """Whether 0.0 may stand for a small logprob."""
    sampling_mask: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
    """Lengths and token ids; see :class:`rollfeed.types.SamplingMask`."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """``(R,)``; None where no teacher was asked."""
    told: NDArray[np.bool_] | None = None
    """Response tokens of which the format says that they were told to the policy. ``(R,)``."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """What a format without tokens says."""

    @property
    def prompt_length(self) -> int:
        """P; 0 where there are no tokens."""
        return 0 if self.token_ids is None else len(self.token_ids) - self.response_length

    @property
    def has_own_context(self) -> bool:
        """Whether it does not begin with its prompt."""
        return bool(self.metadata.get(OWN_CONTEXT))

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """A view. ``(R,)``."""
        return self.tokens[self.prompt_length :]

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The tokens; none where the format has none."""
        return np.empty(0, np.int32) if self.token_ids is None else self.token_ids


def ids_of(values: ArrayLike) -> NDArray[np.int32]:
    """Return token ids as an array. Raises ValueError if they are not numbers, or too large."""
    ids = np.asarray(values, dtype=np.int64 if np.size(values) else None).reshape(-1)
    if ids.size and not (ids.min() >= 0 and ids.max() < 2**31):
        raise ValueError(f"token ids go from {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)


def numbers_of(values: Any) -> NDArray[np.float32] | None:
    """Return weights or logprobs as an array, with NaN for what is missing; None for none at all."""
    if values is None:
        return None
    return np.array([np.nan if value is None else value for value in values], np.float32)
