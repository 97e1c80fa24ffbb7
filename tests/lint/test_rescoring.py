"""What a model says again of samples is compared with what they have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.lint.making import made

from rollfeed.lint import Flaw, OtherModelError, Rescored, SamplePlace, compare

NOISE = np.random.default_rng(0)


def scored(index: int) -> Rescored:
    """Return a sample, and what its model says in another precision."""
    subject = made().subject(place=SamplePlace("step 0", 0, index, index))
    expected = subject.logprobs.astype(np.float64) + NOISE.normal(0.0, 1e-4, subject.response_length)
    return Rescored(subject, expected, subject.loss_mask > 0)


def changed(sample: Rescored, logprobs: np.ndarray) -> Rescored:
    return replace(sample, subject=replace(sample.subject, logprobs=logprobs.astype(np.float32)))


def kinds(*samples: Rescored, is_restricted: bool = False) -> list[tuple[Flaw, object]]:
    found = compare(samples, tolerance=0.01, is_restricted=is_restricted, marks=None)
    return [(each.kind, each.place.sample) for each in found]


def test_noise_is_no_finding() -> None:
    assert kinds(*map(scored, range(4))) == []


def test_one_other_logprob_is_found() -> None:
    odd = scored(3)
    logprobs = odd.subject.logprobs.copy()
    logprobs[2] -= 0.3
    assert kinds(*map(scored, range(3)), changed(odd, logprobs)) == [(Flaw.LOGPROB_OF_ANOTHER_TOKEN, 3)]


@pytest.mark.parametrize("shift", [-1, 1])
def test_logprobs_of_the_tokens_beside_are_found_in_one_sample_and_in_all(shift: int) -> None:
    late = [changed(each, np.roll(each.subject.logprobs, shift)) for each in map(scored, range(4))]
    assert kinds(*map(scored, range(3)), late[3]) == [(Flaw.LOGPROB_OF_ANOTHER_TOKEN, 3)]
    assert kinds(*late) == [(Flaw.LOGPROB_OF_ANOTHER_TOKEN, index) for index in range(4)]


def test_another_model_is_told_from_faults() -> None:
    others = [replace(each, logprobs=each.logprobs - 0.5) for each in map(scored, range(4))]
    with pytest.raises(OtherModelError, match="nats a token"):
        kinds(*others)


def test_tokens_may_be_likelier_where_others_were_left_out() -> None:
    samples = [changed(each, each.subject.logprobs * 0.5) for each in map(scored, range(3))]
    assert kinds(*samples, is_restricted=True) == []
    worse = changed(samples[0], samples[0].subject.logprobs - 3.0)
    assert {kind for kind, _ in kinds(*samples[1:], worse, is_restricted=True)} == {Flaw.LOGPROB_OF_ANOTHER_TOKEN}
