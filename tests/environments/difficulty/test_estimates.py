from __future__ import annotations

import os
import subprocess
import sys

import pytest
from scipy.special import betainc

from rollfeed.environments.difficulty.band import LevelEstimate
from rollfeed.protocols import LevelOutcome


def estimate_of(*num_correct: int) -> LevelEstimate:
    estimate = LevelEstimate()
    for each in num_correct:
        estimate.add(LevelOutcome(level=0, num_judged=8, num_correct=each))
    return estimate


def test_groups_whose_rollouts_are_alike_are_worth_one_rollout_each() -> None:
    alike = estimate_of(*[8, 0, 8, 8] * 20)
    right, wrong = alike.accuracies, alike.num_groups - alike.accuracies
    assert alike.chance_above(0.5) == pytest.approx(1 - betainc(1 + right, 1 + wrong, 0.5), abs=0.02)


def test_groups_whose_rollouts_are_independent_are_worth_almost_all_of_them() -> None:
    mixed = estimate_of(*[6] * 20)
    assert mixed.chance_above(0.6) > 0.99 > estimate_of(*[8, 8, 8, 0] * 5).chance_above(0.6)
    assert estimate_of(6).chance_above(0.6) < 0.9, "one group proves nothing"


def test_what_a_level_teaches_is_the_spread_within_groups() -> None:
    assert LevelEstimate().learnable() == 0.25
    assert (
        estimate_of(*[4] * 50).learnable() > estimate_of(*[7] * 50).learnable() > estimate_of(*[0, 8] * 25).learnable()
    )


def test_old_groups_are_forgotten() -> None:
    estimate = estimate_of(*[8] * 100, *[0] * 20)
    assert estimate.accuracies / estimate.num_groups == pytest.approx(0.9**20, abs=1e-3)
    assert estimate.num_groups < 10.01


def test_the_command_starts_without_what_only_estimates_need() -> None:
    """In another process: what is imported here stays imported."""
    source = """
import sys
import rollfeed.app
print(sorted({"gmpy2", "mpmath", "scipy", "sympy", "torch"} & sys.modules.keys()))
"""
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", source], env=path, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
