from dataclasses import replace

import numpy as np

from rollfeed.benchmarks.gateway.fake_policy import EngineTurn, digest
from rollfeed.benchmarks.gateway.sampled_once import compare
from rollfeed.testing import make_sample
from rollfeed.types import Sample

PROMPT = [7, 8]


def turn(context: list[int], token_ids: list[int], logprob: float = -0.3) -> EngineTurn:
    return EngineTurn(digest(np.array(context, np.int32)), token_ids, [logprob] * len(token_ids))


SAMPLED = [turn(PROMPT, [1, 2]), turn([*PROMPT, 1, 2, 9, 9], [3])]


def sample() -> Sample:
    mask = np.array([1, 1, 0, 0, 1], np.float32)
    return replace(
        make_sample("12345"),
        token_ids=np.array([*PROMPT, 1, 2, 9, 9, 3], np.int32),
        loss_mask=mask,
        logprobs=np.float32(-0.3) * mask,
    )


def test_a_sample_of_what_was_sampled_is_clean() -> None:
    found = compare([sample()], SAMPLED)
    assert (found.num_samples, found.num_trained) == (1, 2)
    assert found.unsampled + found.doubled + found.untrained == []


def test_a_turn_that_no_sample_has_is_untrained() -> None:
    lost = turn([1], [2])
    assert compare([sample()], [*SAMPLED, lost]).untrained == [lost.context]


def test_a_turn_that_is_trained_twice_is_doubled() -> None:
    found = compare([sample(), sample()], SAMPLED)
    assert len(found.doubled) == 2
    assert not found.untrained


def test_a_logprob_whose_last_bit_differs_was_not_sampled() -> None:
    logprobs = sample().logprobs.copy()
    logprobs[4] = np.nextafter(logprobs[4], np.float32(0))
    found = compare([replace(sample(), logprobs=logprobs)], SAMPLED)
    assert len(found.unsampled) == 1
    assert found.untrained == [SAMPLED[1].context]


def test_a_turn_after_other_tokens_than_it_was_sampled_after_was_not_sampled() -> None:
    token_ids = sample().token_ids.copy()
    token_ids[5] = 10  # between the two turns
    assert len(compare([replace(sample(), token_ids=token_ids)], SAMPLED).unsampled) == 1


def test_a_mask_that_is_shifted_is_seen() -> None:
    mask = np.array([0, 1, 1, 0, 1], np.float32)
    assert len(compare([replace(sample(), loss_mask=mask)], SAMPLED).unsampled) == 1
