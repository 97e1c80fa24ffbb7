"""Logs as a run that trains writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from rollfeed.evaluation.statistics import wilson_interval
from rollfeed.report import Curves, curves_of

NUM_PROMPTS = 100


@pytest.fixture
def evaluation() -> Callable[..., dict[str, Any]]:
    """Return a function that makes a record of eval.jsonl from how many of 100 prompts were right, by set."""

    def record(step: int, right_by_set: Mapping[str, int | None]) -> dict[str, Any]:
        sets = {}
        for name, right in right_by_set.items():
            low, high = wilson_interval(right or 0, 0 if right is None else NUM_PROMPTS)
            accuracy = None if right is None else right / NUM_PROMPTS
            sets[name] = {
                "num_prompts": 0 if right is None else NUM_PROMPTS,
                "num_failed": NUM_PROMPTS if right is None else 0,
                "reward_mean": accuracy,
                "accuracy": accuracy,
                "accuracy_low": low,
                "accuracy_high": high,
                "truncated_ratio": None if right is None else 0.25,
                "response_length_mean": None if right is None else 31.5,
            }
        return {"step": step, "sets": sets}

    return record


@pytest.fixture
def learning(evaluation: Callable[..., dict[str, Any]]) -> Curves:
    """A run of four batches that learns, evaluated three times on one set."""
    return curves_of(
        evaluations=[evaluation(step, {"sums": right}) for step, right in ((0, 20), (2, 60), (4, 90))],
        trained=[{"step": step, "train/entropy": 1.0 - step / 10, "train/mismatch_kl": 1e-6} for step in range(4)],
        metrics=[
            {"step": step, "rollout/reward_mean": 0.2 * step, "rollout/response_length_mean": 40.0} for step in range(4)
        ],
    )
