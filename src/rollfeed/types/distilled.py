"""Samples and the teacher that has scored them.

Axes: R response tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import RewardError
from rollfeed.types.records import Sample


def above_policy(sample: Sample) -> NDArray[np.float64]:
    """Return by how many nats the teacher finds each trained token likelier than what sampled it; 0 elsewhere.

    ``(R,)``. On average over sampled tokens, minus this is the divergence of the policy from the teacher.

    Raises:
        RewardError: If no teacher has scored the sample.
    """
    if sample.teacher_logprobs is None:
        raise RewardError(f"sample {sample.index} has no teacher_logprobs: nothing has asked a teacher")
    above, trained = np.zeros(sample.response_length), sample.loss_mask != 0
    above[trained] = sample.teacher_logprobs[trained].astype(np.float64) - sample.logprobs[trained]
    return above
