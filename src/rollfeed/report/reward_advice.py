"""Rules on rewards that may be learned ones: whether what they pay for is still what is wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

_Record = Mapping[str, Any]
STREAK = 5
"""Last steps over which these numbers are averaged."""
_LONG, _CORRELATED = 0.6, "reward/length_correlation"
_EQUAL, _DISAGREES = 0.9, 0.55


class RewardSign(NamedTuple):
    """One thing that goes wrong with a reward."""

    name: str
    records: Sequence[_Record]
    setting: str
    seen: str
    """Has {steps} where these are told."""
    remedy: str


def reward_signs(metrics: Sequence[_Record], evaluations: Sequence[_Record]) -> list[RewardSign]:
    """Return what the last steps and the evaluations say of the reward, the gravest first."""
    return [sign for rule in _RULES if (sign := rule(metrics, evaluations)) is not None]


def _divergence(metrics: Sequence[_Record], evaluations: Sequence[_Record]) -> RewardSign | None:
    """Tell of a reward that rises while held-out accuracy falls: the policy learns what fools what scores."""
    if len(evaluations) < 2:
        return None
    since, last = evaluations[0]["step"], evaluations[-1]["step"]
    fell = {name: change for name, change in evaluations[-1].get("change", {}).items() if change["high"] < 0}
    own = [each for each in metrics if since <= each["step"] <= last]
    first, now = (_mean(part, "rollout/reward_mean") for part in (own[:STREAK], own[-STREAK:]))
    deviation = _mean(own, "rollout/reward_std")
    if not fell or first is None or now is None or len(own) < 2 * STREAK or now - first <= 0.1 * (deviation or 0.0):
        return None
    name, change = min(fell.items(), key=lambda each: float(each[1]["accuracy"]))
    rose = f"reward rose from {first:.3g} to {now:.3g} in {{steps}}"
    seen = f"{rose}, and accuracy on {name} fell by {-change['accuracy']:.3f}"
    remedy = "the policy learns what fools the reward; go back to an earlier checkpoint, and weigh a reference"
    return RewardSign("reward_hacked", own, "train.loss.kl_coefficient", seen, remedy)


def _of_length(metrics: Sequence[_Record], evaluations: Sequence[_Record]) -> RewardSign | None:
    """Tell of rewards that follow the length of answers."""
    found, window = _mean(metrics[-STREAK:], _CORRELATED), metrics[-STREAK:]
    before, now = (_mean(part, "rollout/response_length_mean") for part in (metrics[:STREAK], window))
    if found is None or before is None or now is None or len(metrics) < 2 * STREAK or abs(found) < _LONG:
        return None
    if abs(now - before) < 0.2 * before or (now > before) is (found < 0):
        return None
    follows = f"reward follows length (correlation {found:.2f} in {{steps}})"
    seen = f"{follows}, and answers go from {before:.0f} to {now:.0f} tokens"
    remedy = "take a penalty, or a reward that knows no length"
    return RewardSign("reward_of_length", window, "reward.overlong", seen, remedy)


def _equal(metrics: Sequence[_Record], evaluations: Sequence[_Record]) -> RewardSign | None:
    """Tell of scores that do not tell answers apart, though a verifier does."""
    window = metrics[-STREAK:]
    found, right = _mean(window, "reward/equal_share"), _mean(window, "reward/label_agreement")
    if found is None or right is None or len(window) < STREAK or found < _EQUAL or right > _DISAGREES:
        return None
    seen = f"{found:.0%} of rewards within groups equal in {{steps}}, right answers and wrong ones alike"
    return RewardSign("reward_equal", window, "reward.rm_type", seen, "score with finer steps, or by another model")


def _agreement(metrics: Sequence[_Record], evaluations: Sequence[_Record]) -> RewardSign | None:
    """Tell of rewards that do not prefer right answers."""
    window = metrics[-STREAK:]
    found, equal = _mean(window, "reward/label_agreement"), _mean(window, "reward/equal_share")
    if found is None or len(window) < STREAK or found >= _DISAGREES or (equal or 0.0) >= _EQUAL:
        return None
    seen = f"right answers get the higher reward in {found:.0%} of pairs in {{steps}}"
    return RewardSign("reward_disagrees", window, "reward.rm_type", seen, "mix in what verifies, or take another model")


_RULES: tuple[Callable[[Sequence[_Record], Sequence[_Record]], RewardSign | None], ...] = (
    *(_divergence, _agreement, _of_length, _equal),
)


def _mean(records: Sequence[_Record], name: str) -> float | None:
    values = [float(each[name]) for each in records if each.get(name) is not None and math.isfinite(each[name])]
    return fmean(values) if values else None
