"""Compares the logprobs of samples with those that a model gives to the same tokens.

Axes: R response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollfeed.base.true_runs import Run, runs_of
from rollfeed.lint.findings import Finding, Flaw
from rollfeed.lint.marks import Marks
from rollfeed.lint.numbers import Spot, finding
from rollfeed.lint.subject import Subject

_TIMES_USUAL = 10.0
_BEST = 0.25
"""The share of samples that tell what the model differs by where nothing is wrong."""
_FEWEST = 3
_LARGEST_RATIO = 0.05
"""How much of a logprob rounding may change, where it is large."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """A sample, and what the model says of its response."""

    subject: Subject
    logprobs: NDArray[np.float64]
    """``(R,)``; NaN where it says nothing."""
    trained: NDArray[np.bool_]


class OtherModelError(Exception):
    """Most samples have other logprobs under the model that was given."""


def compare(
    scored: Sequence[Rescored], *, tolerance: float, is_restricted: bool, marks: Marks | None
) -> Iterator[Finding]:
    """Yield the tokens whose logprobs the model does not give, sample by sample.

    Of at least one sample with logprobs. The engine's precision explains ``tolerance`` nats; ``is_restricted`` says
    that tokens were drawn from a part of the vocabulary, which makes them likelier.

    Raises:
        OtherModelError: If that would be most of them.
    """
    differences = [_differences(each, is_restricted=is_restricted) for each in scored]
    pairs = list(zip(scored, differences, strict=True))
    beside = [not is_restricted and _is_beside(each, difference, tolerance) for each, difference in pairs]
    usual = [_size(difference) for difference, is_beside in zip(differences, beside, strict=True) if not is_beside]
    best = float(np.nanquantile(usual, _BEST, method="lower")) if np.isfinite(usual).any() else 0.0
    if best > tolerance:
        raise OtherModelError(f"it gives other logprobs, by {best:.2g} nats a token in most samples")
    allowed = max(tolerance, _TIMES_USUAL * best)
    for (each, difference), is_beside in zip(pairs, beside, strict=True):
        told, length = each.subject.logprobs, each.subject.response_length
        assert told is not None
        if is_beside:
            spot = Spot(Flaw.LOGPROB_OF_ANOTHER_TOKEN, 0, length, "the model gives them to the tokens beside")
            yield finding(each.subject, spot, marks)
            continue
        wrong = np.nan_to_num(np.abs(difference)) > allowed + _LARGEST_RATIO * np.abs(np.nan_to_num(told))
        for run in _joined(runs_of(wrong)):
            size = float(np.nanmax(np.abs(difference[run.start : run.end])))
            found = Spot(_kind(each, run, wrong, marks), *run, f"the model differs by up to {size:.3g} nats")
            yield finding(each.subject, found, marks)


def _size(difference: NDArray[np.float64]) -> float:
    """Return the median of what is known; NaN where nothing is."""
    known = np.abs(difference[np.isfinite(difference)])
    return float(np.median(known)) if len(known) else np.nan


def _is_beside(scored: Rescored, difference: NDArray[np.float64], tolerance: float) -> bool:
    """Whether the model gives most logprobs to the tokens beside their own."""
    told = scored.subject.logprobs
    assert told is not None
    known = np.flatnonzero(scored.trained)[1:-1]
    if len(known) < _FEWEST or not _size(difference) > tolerance:
        return False
    return any(_size(told[known] - scored.logprobs[known + shift]) <= tolerance for shift in (-1, 1))


def _differences(scored: Rescored, *, is_restricted: bool) -> NDArray[np.float64]:
    logprobs = scored.subject.logprobs
    assert logprobs is not None
    difference = np.where(scored.trained, logprobs - scored.logprobs, np.nan)
    return np.minimum(difference, 0.0) if is_restricted else difference


def _kind(scored: Rescored, run: Run, wrong: NDArray[np.bool_], marks: Marks | None) -> Flaw:
    """Tell whether all of a turn that follows is wrong, and what a tokenizer makes of its text."""
    ids = scored.subject.response_ids
    turn = next((each for each in runs_of(scored.trained) if each.start <= run.start < each.end), run)
    if marks is None or not wrong[run.start : turn.end].all():
        return Flaw.LOGPROB_OF_ANOTHER_TOKEN
    said = ids[turn.start : turn.end]
    again = marks.tokenizer.encode(marks.decode(said), add_special_tokens=False)
    return Flaw.RETOKENISED_TURN if np.array_equal(said, again) else Flaw.LOGPROB_OF_ANOTHER_TOKEN


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Return runs with those in one that have at most one token between them."""
    joined: list[Run] = []
    for run in runs:
        if joined and run.start - joined[-1].end <= 1:
            joined[-1] = Run(joined[-1].start, run.end)
        else:
            joined.append(run)
    return joined
