"""Whether an engine has the weights that it was given, by what it says of a few texts.

An engine that computes in another precision says something else of a text than its publisher, always, and more than a
small update changes. But it says so before and after the update. So changes are compared: of the engine's
log-probabilities since a base, and of the publisher's. Where the weights have arrived, the engine's change is the
publisher's and noise, about as large as the difference was at the base. Where they have not, it is a smaller one, or
another one altogether.

- The *slope* is how much of the publisher's change the engine has made: ``d_e . d_p / d_p . d_p``. Noise goes along
  with the change in part only, so that the slope is known better than any token's change.
- The *residual* is what is between the changes, the mean of ``|d_e - d_p|`` over the tokens. Means of absolute values,
  since noise has long tails: a few tokens would decide about a mean of squares.

Axes: N tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_CERTAIN = 5.0
"""Standard errors: noise has long tails, and no normal law holds out there."""
_ALONG = 0.75
"""Of the noise that may lie along the change. Texts of one template are alike, so that neither their noise nor their
changes are independent: 0.58 has been seen on SmolLM2, in 400 tokens.
"""
LOWEST_SLOPE = 0.9
"""Coarse types follow a change of the weights in jumps, and so by more or less of it."""
PROVED_SLOPE = 0.5
"""An engine above is not one that has stayed behind."""
_MOST_NOISE = 2.0
"""That a residual may have, in those of the base; of a publisher's own weights it is the root of 2 at most."""
_LEAST_NOISE = 2e-5
"""Nats a token: what float32 may add up to."""
_SHARE_OF_NOISE = 5.0
_LARGEST_SHARE = 0.3
"""What a precision with much noise leaves of a change: see :func:`_allowed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The log-probabilities of the same tokens by an engine and by the publisher, at one version."""

    policy_version: int
    engine_N: NDArray[np.float64]
    publisher_N: NDArray[np.float64]

    @property
    def noise(self) -> float:
        """Mean absolute difference between the two, in nats a token."""
        return max(_LEAST_NOISE, _size(self.engine_N - self.publisher_N))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Changes since a base, compared. Of an engine that has the weights, ``slope`` is about 1."""

    base_version: int
    num_tokens: int
    slope: float
    slope_error: float
    """The most that noise explains; infinite where the publisher's weights have not changed anything."""
    change: float
    """Of the publisher: mean absolute value, in nats a token."""
    residual: float
    """As ``change``."""
    noise: float
    """Of the base."""

    @property
    def is_behind(self) -> bool:
        """Whether the engine has certainly not made the change."""
        return self.slope + self.slope_error < LOWEST_SLOPE

    @property
    def is_other(self) -> bool:
        """Whether the engine has certainly made another change."""
        return self.residual > _allowed(self.noise, self.change)

    @property
    def is_proved(self) -> bool:
        """Whether the engine has certainly changed with the publisher."""
        return not self.is_other and self.slope - self.slope_error > PROVED_SLOPE

    @property
    def is_refuted(self) -> bool:
        """Whether the engine certainly has other weights."""
        return self.is_behind or self.is_other

    def __str__(self) -> str:
        return (
            f"of the change since version {self.base_version} ({self.change:.2g} nats a token over {self.num_tokens} "
            f"tokens) it has made {self.slope:.3g} +- {self.slope_error:.1g}, and {self.residual:.2g} nats a token are "
            f"other changes, where its precision explains {_allowed(self.noise, self.change):.2g}"
        )


def compare(base: Scores, now: Scores) -> Comparison:
    """Compare what has changed since a base; both are of the same tokens."""
    change_N = now.publisher_N - base.publisher_N
    engine_change_N = now.engine_N - base.engine_N
    square = float(change_N @ change_N)
    slope, error = 1.0, math.inf
    if square > 0.0:
        slope = float(engine_change_N @ change_N) / square
        # Where an engine is noisy it was at the base; where it has changed nothing, nothing else tells of its noise.
        noise_N = np.abs(base.engine_N - base.publisher_N)
        largest_N = np.maximum(noise_N, np.abs(engine_change_N - slope * change_N))
        mean_square = max(_LEAST_NOISE**2, float(np.mean(noise_N**2)))
        independent = math.sqrt(float(change_N**2 @ np.maximum(largest_N**2, mean_square))) / square
        error = max(_CERTAIN * independent, _ALONG * math.sqrt(mean_square * len(change_N) / square))
    return Comparison(
        base_version=base.policy_version,
        num_tokens=len(change_N),
        slope=slope,
        slope_error=error,
        change=_size(change_N),
        residual=_size(engine_change_N - change_N),
        noise=base.noise,
    )


def _allowed(noise: float, change: float) -> float:
    """Return how large a residual may be: noise, and the more of the change the more noise there is."""
    return _MOST_NOISE * noise + min(_LARGEST_SHARE, _SHARE_OF_NOISE * noise) * change


def _size(values_N: NDArray[np.float64]) -> float:
    return float(np.mean(np.abs(values_N)))
