"""Simulates the policies of difficulty beside each other; writes bench/difficulty.json and a table of docs/adaptive.md.

Changes: one environment whose hardest level always has the same true accuracy, 10,000 groups a row: how often the
level goes up or down, per 100 groups at it, and the chance that it has within the first 100. Problems of a level are
alike, or differ: then each has a chance of its own, Beta with a sum of 2 of its parameters. Recovery: a policy that
solved levels up to 9 and then up to 2 only: groups with right and wrong answers before and after, and steps until the
hardest level is one of the first that are not solved. Learning: a policy gets better by what its groups teach; share of
groups with right and wrong answers, over how steep levels are, how much problems differ, and groups a step.

::

    python bench/difficulty.py
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from rollfeed.environments.difficulty import band
from rollfeed.environments.difficulty.band import BandPolicy
from rollfeed.environments.difficulty.learning_progress import LearningProgressPolicy
from rollfeed.environments.difficulty.rlve import FixedPolicy, RlvePolicy
from rollfeed.protocols import DifficultyPolicy, LevelOutcome

OUT = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "adaptive.md"
GROUP_SIZE, NUM_GROUPS, RUN_GROUPS = 8, 10_000, 100
ACCURACIES = (0.05, 0.3, 0.5, 0.8, 0.9)
POLICIES: dict[str, Callable[[int], DifficultyPolicy]] = {
    "rlve": lambda level: RlvePolicy(level, 4, least_accuracy=0.9, least_rollouts=8 * GROUP_SIZE),
    "band": lambda level: BandPolicy(level, 4),
    "learning_progress": lambda level: LearningProgressPolicy(level, 4),
    "fixed": lambda level: FixedPolicy(level + 3, 4),
}
VARIANTS: tuple[dict[str, float], ...] = (
    {},
    {"_UP": 0.5},
    {"_UP": 0.75},
    {"_DOWN": 0.1},
    {"_DOWN": 0.3},
    {"_CONFIDENCE": 0.8},
    {"_CONFIDENCE": 0.95},
    {"_KEEP": 0.8},
    {"_KEEP": 0.95},
    {"_LEAST_GROUPS": 8},
    {"_SHARPNESS": 1},
    {"_SHARPNESS": 2},
    {"_LEAST_WEIGHT": 0.1},
)
LEARNING = [(slope, differ, groups) for slope in (0.7, 2.0, 4.0) for differ in (0.0, 1.5) for groups in (1, 8)]
"""Logits from level to level, deviation of a problem's logit, and groups a step."""


def main() -> None:
    record = {
        "group_size": GROUP_SIZE,
        "changes": [
            {"policy": name, "accuracy": accuracy, "problems": problems, **changes(POLICIES[name], accuracy, problems)}
            for name in ("rlve", "band")
            for accuracy in ACCURACIES
            for problems in ("alike", "differ")
        ],
        "recovery": {name: recovery(make) for name, make in POLICIES.items()},
        "learning": {name: learning(make) for name, make in POLICIES.items()},
        "band_variants": [],
    }
    for variant in VARIANTS:
        with constants(variant):
            found = {
                "constants": variant,
                "learning": statistics.fmean(learning(POLICIES["band"])["shares"]),
                "up_at_0.5_per_100_groups": changes(POLICIES["band"], 0.5, "alike")["up_per_100_groups"],
                "down_at_0.3_per_100_groups": changes(POLICIES["band"], 0.3, "alike")["down_per_100_groups"],
                "steps_to_recover": recovery(POLICIES["band"])["steps_to_recover"],
            }
        record["band_variants"].append(found)
    OUT.write_text(json.dumps(record, indent=1) + "\n")
    text = PAGE.read_text(encoding="utf-8")
    table = "\n".join(lines(record))
    PAGE.write_text(re.sub(r"(?<=<!-- changes -->\n).*?(?=<!-- /changes -->)", f"{table}\n", text, flags=re.DOTALL))
    print(table)


def lines(record: dict[str, Any]) -> Iterator[str]:
    """Yield what docs/adaptive.md shows."""
    yield "| true accuracy | problems | `rlve` goes up | `band` goes up | `band` goes down |"
    yield "|---|---|---|---|---|"
    rows = {(row["policy"], row["accuracy"], row["problems"]): row for row in record["changes"]}
    for accuracy in ACCURACIES:
        for problems in ("alike", "differ"):
            published, ours = (rows[name, accuracy, problems] for name in ("rlve", "band"))
            found = published["up_within_100"], ours["up_within_100"], ours["down_within_100"]
            yield f"| {accuracy:g} | {problems} | {' | '.join(f'{share:.0%}' for share in found)} |"
    yield ""
    recovery, learning = record["recovery"], record["learning"]
    shares = ", ".join(f"`{name}` {learning[name]['mean'][0]:.0%}" for name in POLICIES)
    yield (
        f"Groups with right and wrong answers while a policy learns, over {len(LEARNING)} kinds of environments: "
        f"{shares} (`fixed` at the first four levels)."
    )
    yield (
        "When a policy that solves levels up to 9 solves only those up to 2 from then on, "
        f"`band` is there after {recovery['band']['steps_to_recover']:.0f} steps of 8 groups, "
        f"`learning_progress` after {recovery['learning_progress']['steps_to_recover']:.0f}, and `rlve` never; of the "
        f"groups of the next 100 steps {recovery['band']['spread_in_100_steps_after']:.0%} of `band`'s and "
        f"{recovery['rlve']['spread_in_100_steps_after']:.0%} of `rlve`'s have right and wrong answers."
    )


@contextmanager
def constants(values: dict[str, float]) -> Iterator[None]:
    """Have ``band`` use other constants in a block."""
    before = {name: getattr(band, name) for name in values}
    try:
        for name, value in values.items():
            setattr(band, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(band, name, value)


def changes(make: Callable[[int], DifficultyPolicy], accuracy: float, problems: str) -> dict[str, float]:
    """Return how often the level changes where its true accuracy is always the same; 4 groups a step, all at it."""
    random, ups, downs, runs_up, runs_down = Random(1), 0, 0, 0, 0
    for _ in range(NUM_GROUPS // RUN_GROUPS):
        policy, run_up, run_down = make(50), 0, 0
        for _ in range(RUN_GROUPS // 4):
            for _ in range(4):
                chance = accuracy if problems == "alike" else random.betavariate(2 * accuracy, 2 - 2 * accuracy)
                policy.observe(outcome_of(policy.level, chance, random))
            before = policy.level
            policy.end_step(max_level=None)
            run_up += policy.level > before
            run_down += policy.level < before
        ups, downs, runs_up, runs_down = (
            ups + run_up,
            downs + run_down,
            runs_up + (run_up > 0),
            runs_down + (run_down > 0),
        )
    runs = NUM_GROUPS // RUN_GROUPS
    return {
        "up_per_100_groups": ups * 100 / NUM_GROUPS,
        "down_per_100_groups": downs * 100 / NUM_GROUPS,
        "up_within_100": runs_up / runs,
        "down_within_100": runs_down / runs,
    }


def recovery(make: Callable[[int], DifficultyPolicy]) -> dict[str, Any]:
    """Return what becomes of the level when a policy forgets: 8 groups a step, means over 20 runs."""
    before, after, steps = [], [], []
    for run in range(20):
        random, policy = Random(run), make(0)
        shares = []
        recovered = None
        for step in range(400):
            hardest = 9 if step < 200 else 2
            num_spread = 0
            weights = policy.weights()
            for level in random.choices(list(weights), list(weights.values()), k=8):
                outcome = outcome_of(level, 1 / (1 + math.exp(2 * (level - hardest - 0.5))), random)
                policy.observe(outcome)
                num_spread += outcome.has_spread
            policy.end_step(max_level=None)
            shares.append(num_spread / 8)
            if step >= 200 and recovered is None and hardest <= policy.level <= hardest + 2:
                recovered = step - 200
        before.append(statistics.fmean(shares[100:200]))
        after.append(statistics.fmean(shares[200:300]))
        if recovered is not None:
            steps.append(recovered)
    return {
        "spread_before": statistics.fmean(before),
        "spread_in_100_steps_after": statistics.fmean(after),
        "runs_recovered": len(steps) / 20,
        "steps_to_recover": statistics.fmean(steps) if steps else None,
    }


def learning(make: Callable[[int], DifficultyPolicy]) -> dict[str, list[float]]:
    """Return the share of groups with right and wrong answers in every case of ``LEARNING``, means over 6 runs."""
    shares = []
    for slope, differ, groups in LEARNING:
        shares.append(statistics.fmean(_learn(make(0), slope, differ, groups, Random(run)) for run in range(6)))
    return {"shares": shares, "mean": [statistics.fmean(shares)]}


def _learn(policy: DifficultyPolicy, slope: float, differ: float, groups: int, random: Random) -> float:
    skill, num_spread, num_all = 0.0, 0, 0
    for _ in range(400 if groups > 1 else 1600):
        weights, gained = policy.weights(), 0.0
        for level in random.choices(list(weights), list(weights.values()), k=groups):
            logit = skill - slope * level + random.gauss(0.0, differ)
            outcome = outcome_of(level, 1 / (1 + math.exp(-max(-50.0, min(50.0, logit)))), random)
            policy.observe(outcome)
            num_spread += outcome.has_spread
            num_all += 1
            gained += outcome.accuracy * (1 - outcome.accuracy)
        policy.end_step(max_level=None)
        skill += 0.02 * gained
    return num_spread / num_all


def outcome_of(level: int, chance: float, random: Random) -> LevelOutcome:
    num_correct = sum(random.random() < chance for _ in range(GROUP_SIZE))
    return LevelOutcome(level=level, num_judged=GROUP_SIZE, num_correct=num_correct)


if __name__ == "__main__":
    main()
