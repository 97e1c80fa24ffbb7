"""The published rule, against another implementation of it: samples in a list, looked at after every step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

import pytest

from rollfeed.environments.difficulty.rlve import FixedPolicy, RlvePolicy
from rollfeed.protocols import LevelOutcome

GROUP_SIZE, WINDOW = 4, 4


def make(level: int = 0, *, least_prompts: int = 8) -> RlvePolicy:
    return RlvePolicy(level, WINDOW, least_accuracy=0.9, least_rollouts=least_prompts * GROUP_SIZE)


def published(steps: list[list[tuple[int, list[int]]]], *, level: int = 0) -> Iterator[tuple[int, float | None]]:
    """Yield level and accuracy after every step, by the words of the rule; groups are levels with 0 or 1 a sample."""
    counted: list[int] = []
    for groups in steps:
        for at, samples in groups:
            if at == level:
                counted.extend(samples)
        accuracy = None
        if len(counted) >= 8 * GROUP_SIZE:
            accuracy = sum(counted) / len(counted)
            level += accuracy >= 0.9
            counted = []
        yield level, accuracy


def recorded(seed: int, num_steps: int = 300) -> list[list[tuple[int, list[int]]]]:
    """Return groups at the levels that a run would have drawn, answered by a policy that learns and forgets."""
    random, level = Random(seed), 0
    steps: list[list[tuple[int, list[int]]]] = []
    for number in range(num_steps):
        skill = number / 20 if number < 200 else 2.0
        groups = []
        for _ in range(random.randrange(6)):
            at = random.randrange(max(0, level - WINDOW + 1), level + 1)
            chance = min(0.98, max(0.02, 1.2 + (skill - at) / 3))
            groups.append((at, [int(random.random() < chance) for _ in range(GROUP_SIZE)]))
        steps.append(groups)
        level = [after for after, _ in published(steps)][-1]
    return steps


@pytest.mark.parametrize("seed", range(3))
def test_a_recorded_trace_drives_the_level_step_by_step_as_published(seed: int) -> None:
    steps, policy, levels = recorded(seed), make(), []
    for groups, (level, accuracy) in zip(steps, published(steps), strict=True):
        assert sorted(policy.weights()) == list(range(max(0, policy.level - 3), policy.level + 1))
        for at, samples in groups:
            policy.observe(LevelOutcome(level=at, num_judged=len(samples), num_correct=sum(samples)))
        assert policy.end_step(max_level=None) == accuracy
        assert policy.level == level
        levels.append(level)
        again = make()
        again.load_state_dict(json.loads(json.dumps(policy.state_dict())))
        policy = again
    assert levels[-1] > 5, "the trace climbs"


def outcome(num_correct: int, *, level: int = 0, count: int = 8 * GROUP_SIZE) -> LevelOutcome:
    return LevelOutcome(level=level, num_judged=count, num_correct=num_correct)


def test_counts_begin_anew_at_every_check_also_where_the_level_stays() -> None:
    policy = make()
    policy.observe(outcome(28))
    assert policy.end_step(max_level=None) == 28 / 32
    assert policy.level == 0
    policy.observe(outcome(31, count=31))  # 59 of 63 with those before, and not enough without
    assert policy.end_step(max_level=None) is None
    policy.observe(outcome(0, count=1))
    assert policy.end_step(max_level=None) == 31 / 32
    assert policy.level == 1


def test_exactly_the_bar_is_enough_and_one_step_is_one_level() -> None:
    policy = make()
    policy.observe(outcome(36, count=40))
    policy.observe(outcome(36, count=40))
    assert policy.end_step(max_level=None) == 0.9
    assert policy.level == 1


def test_easier_levels_do_not_count() -> None:
    policy = make(3)
    policy.observe(outcome(32, level=2))
    assert policy.end_step(max_level=None) is None
    assert policy.level == 3


def test_the_hardest_level_there_is_stays_the_hardest() -> None:
    policy = make(2)
    policy.observe(outcome(32, level=2))
    assert policy.end_step(max_level=2) == 1.0
    assert policy.level == 2


def test_fixed_levels_stay() -> None:
    policy = FixedPolicy(2, 2)
    policy.observe(outcome(32, level=2))
    assert policy.end_step(max_level=None) is None
    assert policy.weights() == {1: 1.0, 2: 1.0}
