from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rollfeed.training.objective import Tally, add_mismatch


def test_means_and_extremes_are_over_trained_tokens_of_all_micro_batches() -> None:
    tally = Tally()
    for values, mask in (([1.0, 5.0, 99.0], [1.0, 0.5, 0.0]), ([-3.0], [1.0])):
        tally.count(torch.tensor(mask))
        tally.add("x", torch.tensor(values), torch.tensor(mask))
        tally.add_extremes("x", torch.tensor(values), torch.tensor(mask))
    assert tally.metrics() == {"tokens": 3.0, "x": 1.0, "x_min": -3.0, "x_max": 5.0}


def test_merged_tallies_are_one() -> None:
    whole, first, second = Tally(), Tally(), Tally()
    for part, values in ((first, [1.0, 2.0]), (second, [7.0])):
        for tally in (whole, part):
            mask = torch.ones(len(values))
            tally.count(mask)
            tally.add("x", torch.tensor(values), mask)
            tally.add_extremes("x", torch.tensor(values), mask)
    first.merge(second)
    assert first.metrics() == whole.metrics()


def test_r20_metrics_without_tokens_are_none() -> None:
    """R20: nothing is divided by zero tokens."""
    tally = Tally()
    tally.count(torch.zeros(3))
    tally.add("x", torch.ones(3), torch.zeros(3))
    tally.add_extremes("x", torch.ones(3), torch.zeros(3))
    assert tally.metrics() == {}
    assert Tally().metrics() == {}


def test_mismatch_metrics_are_the_formulas() -> None:
    trainer, rollout = np.array([-1.0, -2.0, -0.5, -9.0]), np.array([-1.2, -1.5, -0.5, 0.0])
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
    tally = Tally()
    tally.count(mask)
    add_mismatch(
        tally,
        trainer_logprobs_T=torch.from_numpy(trainer),
        rollout_logprobs_T=torch.from_numpy(rollout),
        mask_T=mask,
    )
    metrics = tally.metrics()
    differences = [0.2, -0.5, 0.0]
    assert metrics["mismatch_k1"] == pytest.approx(-sum(differences) / 3)
    assert metrics["mismatch_kl"] == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / 3)
    assert metrics["mismatch_abs"] == pytest.approx(0.7 / 3)
    assert metrics["mismatch_abs_max"] == pytest.approx(0.5)
    assert metrics["mismatch_ratio_min"] == pytest.approx(math.exp(-0.5))
    assert metrics["mismatch_ratio_max"] == pytest.approx(math.exp(0.2))
