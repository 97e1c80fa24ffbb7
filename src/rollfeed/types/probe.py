"""The log-probabilities of a few texts under a publisher's weights, by which an engine shows whether it has them.

Axes: N tokens that have a log-probability: of each text all but the first, text after text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_TEXTS = 256
MOST_TOKENS = 16_384
"""Of all texts together: a probe is small against a step."""
PUBLISHED = "published"
"""How the weights are in the checkpoint that is published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightProbe:
    """Token ids of a few texts, and their log-probabilities under the weights of one version.

    Raises:
        ValueError: If there is no text, one has fewer than two tokens, they are too many, or log-probabilities are
            missing, too many or not finite.
    """

    texts: tuple[NDArray[np.int32], ...]
    """Token ids."""
    logprobs: Mapping[str, NDArray[np.float64]]
    """``(N,)`` each: natural logarithms, before any temperature. Several entries are the weights as an engine may hold
    them: ``published``, or rounded to the type that the entry is named after, for example ``bfloat16``.
    """
    seconds: float = 0.0
    """That the publisher took for them."""

    def __post_init__(self) -> None:
        lengths = [len(text) for text in self.texts]
        if not 1 <= len(lengths) <= MOST_TEXTS or min(lengths) < 2 or sum(lengths) > MOST_TOKENS:
            raise ValueError(
                f"{len(lengths)} texts of {sum(lengths)} tokens, the shortest of {min(lengths, default=0)}: a probe "
                f"has 1 to {MOST_TEXTS} texts of at least 2 tokens each, at most {MOST_TOKENS} together"
            )
        if any(text.ndim != 1 or int(text.min()) < 0 for text in self.texts):
            raise ValueError("a text is not a list of token ids")
        num_tokens = sum(lengths) - len(lengths)
        if not self.logprobs:
            raise ValueError("there are no log-probabilities")
        for name, logprobs_N in self.logprobs.items():
            if logprobs_N.shape != (num_tokens,) or not np.isfinite(logprobs_N).all() or logprobs_N.max() > 1e-3:
                raise ValueError(
                    f"{name}: {logprobs_N.size} log-probabilities for {num_tokens} tokens (all but the first of each "
                    "text), or some that are not finite or above 0"
                )
