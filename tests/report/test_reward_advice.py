from __future__ import annotations

from typing import Any

import pytest

from rollfeed.report.reward_advice import reward_signs


def steps(**changes: Any) -> list[dict[str, Any]]:
    """Twelve steps of a run in which nothing is wrong; what changes goes in a line between two values."""
    fine = {
        "rollout/reward_mean": (0.2, 0.8),
        "rollout/reward_std": (0.3, 0.3),
        "rollout/response_length_mean": (100.0, 105.0),
        "reward/length_correlation": (0.1, 0.1),
        "reward/equal_share": (0.1, 0.1),
        "reward/label_agreement": (0.9, 0.9),
    }
    values = {**fine, **{name.replace("__", "/"): value for name, value in changes.items()}}
    return [
        {"step": step, **{name: low + (high - low) * step / 11 for name, (low, high) in values.items()}}
        for step in range(12)
    ]


def evaluations(change: float) -> list[dict[str, Any]]:
    about = {"held_out": {"accuracy": change, "low": change - 0.05, "high": change + 0.05}}
    return [{"step": 0, "change": {}}, {"step": 12, "change": about}]


@pytest.mark.parametrize(
    ("changes", "fell", "names"),
    [
        ({}, 0.2, []),
        ({}, -0.2, ["reward_hacked"]),
        ({"rollout__reward_mean": (0.8, 0.2)}, -0.2, []),
        ({"reward__label_agreement": (0.4, 0.4)}, 0.2, ["reward_disagrees"]),
        ({"reward__length_correlation": (0.8, 0.8)}, 0.2, []),
        (
            {"reward__length_correlation": (0.8, 0.8), "rollout__response_length_mean": (100.0, 300.0)},
            0.2,
            ["reward_of_length"],
        ),
        (
            {"reward__length_correlation": (-0.8, -0.8), "rollout__response_length_mean": (100.0, 300.0)},
            0.2,
            [],
        ),
        ({"reward__equal_share": (0.95, 0.95), "reward__label_agreement": (0.5, 0.5)}, 0.2, ["reward_equal"]),
        ({"reward__equal_share": (0.95, 0.95)}, 0.2, []),
    ],
)
def test_signs(changes: dict[str, Any], fell: float, names: list[str]) -> None:
    assert [sign.name for sign in reward_signs(steps(**changes), evaluations(fell))] == names


def test_the_alarm_says_what_rose_and_what_fell() -> None:
    (sign,) = reward_signs(steps(), evaluations(-0.2))
    assert sign.seen == "reward rose from 0.309 to 0.691 in {steps}, and accuracy on held_out fell by 0.200"
