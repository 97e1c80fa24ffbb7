"""How much each token counts in the loss of a mini-batch.

Axes: T response tokens of any number of sequences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollfeed.config.train import Normalisation


def token_weights(
    mask_T: NDArray[np.float32],
    rollout_ids_T: NDArray[np.int64],
    *,
    normalisation: Normalisation,
    constant_length: int | None = None,
) -> NDArray[np.float32]:
    """Return what each token's loss is multiplied with before all are added up, ``(T,)``.

    Only trained tokens count: sequences that are masked out altogether change neither the sum nor what it is divided
    by. Forks of one rollout are one output: they share its weight.

    Args:
        mask_T: The weight of each token of the whole mini-batch; 0 is not trained on.
        rollout_ids_T: Equal for the tokens of one rollout.
        normalisation: ``TOKEN`` divides by all trained tokens (DAPO, arXiv:2503.14476, section 3.3); ``SEQUENCE`` by
            those of the rollout, and then by the rollouts (GRPO, arXiv:2402.03300, section 4.1.1, equation 3);
            ``CONSTANT`` by ``constant_length`` instead of the former (Dr. GRPO, arXiv:2503.20783, section 3.2).
        constant_length: Needed for ``CONSTANT``.

    Raises:
        ValueError: If it is needed and not given.
    """
    mask_64 = np.asarray(mask_T, np.float64)
    if not mask_64.any():
        return np.zeros(len(mask_64), np.float32)
    if normalisation is Normalisation.TOKEN:
        return np.asarray(mask_64 / mask_64.sum(), np.float32)
    _, number_T = np.unique(rollout_ids_T, return_inverse=True)
    sums = np.bincount(number_T, weights=mask_64)
    num_rollouts = np.count_nonzero(sums)
    if normalisation is Normalisation.SEQUENCE:
        return np.asarray(mask_64 / np.where(sums > 0, sums, 1.0)[number_T] / num_rollouts, np.float32)
    if constant_length is None:
        raise ValueError("normalisation by a constant needs constant_length")
    return np.asarray(mask_64 / (constant_length * num_rollouts), np.float32)
