"""What the policies make of a policy with a known accuracy at every level."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest

from rollfeed.environments.difficulty.band import BandPolicy
from rollfeed.environments.difficulty.learning_progress import LearningProgressPolicy
from rollfeed.protocols import DifficultyPolicy, LevelOutcome

GROUP_SIZE = 8


def play(policy: DifficultyPolicy, accuracy: Callable[[int], float], *, num_steps: int, random: Random) -> list[int]:
    """Draw 4 groups a step at the policy's levels, and return its level after each step."""
    levels = []
    for _ in range(num_steps):
        weights = policy.weights()
        for level in random.choices(list(weights), list(weights.values()), k=4):
            num_correct = sum(random.random() < accuracy(level) for _ in range(GROUP_SIZE))
            policy.observe(LevelOutcome(level=level, num_judged=GROUP_SIZE, num_correct=num_correct))
        policy.end_step(max_level=None)
        levels.append(policy.level)
    return levels


def solved_up_to(hardest: int) -> Callable[[int], float]:
    return lambda level: 0.95 if level <= hardest else 0.05


@pytest.mark.parametrize("make", [BandPolicy, LearningProgressPolicy])
def test_the_level_climbs_to_the_first_that_is_not_solved(make: Callable[..., DifficultyPolicy]) -> None:
    levels = play(make(0, 4), solved_up_to(6), num_steps=200, random=Random(1))
    assert set(levels[100:]) <= {6, 7}
    assert max(abs(after - before) for before, after in pairwise(levels)) == 1


@pytest.mark.parametrize(("accuracy", "change"), [(0.3, 0), (0.4, 0), (0.9, 1), (0.05, -1)])
def test_a_band_moves_where_its_hardest_level_is_surely_outside(accuracy: float, change: int) -> None:
    random, moves = Random(3), []
    for _ in range(50):
        policy = BandPolicy(5, 1)
        play(policy, lambda level: accuracy, num_steps=5, random=random)
        moves.append((policy.level > 5) - (policy.level < 5))
    assert moves.count(change) >= 45


@pytest.mark.parametrize("make", [BandPolicy, LearningProgressPolicy])
def test_the_level_comes_down_after_a_collapse_and_goes_up_again(make: Callable[..., DifficultyPolicy]) -> None:
    policy, random = make(0, 4), Random(2)
    assert play(policy, solved_up_to(9), num_steps=150, random=random)[-1] in (9, 10)
    assert play(policy, solved_up_to(2), num_steps=150, random=random)[-1] in (2, 3)
    assert play(policy, solved_up_to(9), num_steps=150, random=random)[-1] in (9, 10)


def test_a_band_waits_for_new_groups_after_a_change() -> None:
    policy = BandPolicy(3, 4)
    right = LevelOutcome(level=3, num_judged=GROUP_SIZE, num_correct=GROUP_SIZE)
    for _ in range(4):
        assert policy.end_step(max_level=None) is None
        policy.observe(right)
    assert policy.end_step(max_level=None) == 1.0
    assert policy.level == 4
    for _ in range(20):
        policy.observe(right)
    assert policy.end_step(max_level=None) is None
    assert policy.level == 4


def after_a_fall() -> BandPolicy:
    """Return a policy that has just gone from 3 to 2, where all is known to be wrong; 1 is known to be right."""
    policy = BandPolicy(3, 4)
    for _ in range(20):
        for level, num_correct in ((1, GROUP_SIZE), (2, 0), (3, 0)):
            policy.observe(LevelOutcome(level=level, num_judged=GROUP_SIZE, num_correct=num_correct))
    policy.end_step(max_level=None)
    assert policy.level == 2
    return policy


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_band_that_falls_goes_on_falling_by_what_it_knows_and_waits_to_go_up(is_restored: bool) -> None:
    policy = after_a_fall()
    if is_restored:
        state = policy.state_dict()
        policy = BandPolicy(0, 4)
        policy.load_state_dict(json.loads(json.dumps(state)))
    levels = []
    for _ in range(4):
        policy.end_step(max_level=None)
        levels.append(policy.level)
        policy.observe(LevelOutcome(level=1, num_judged=GROUP_SIZE, num_correct=GROUP_SIZE))
    assert levels == [1, 1, 1, 1]
    policy.end_step(max_level=None)
    assert policy.level == 2


def test_a_band_forgets_what_it_has_left_behind() -> None:
    policy = BandPolicy(0, 2)
    play(policy, solved_up_to(9), num_steps=100, random=Random(1))
    assert set(policy.state_dict()["estimates"]) <= {str(level) for level in policy.window}


def test_a_band_stays_within_the_levels_that_there_are() -> None:
    policy = BandPolicy(0, 4)
    play(policy, lambda level: 0.0, num_steps=20, random=Random(1))
    assert policy.level == 0
    for _ in range(20):
        policy.observe(LevelOutcome(level=0, num_judged=GROUP_SIZE, num_correct=GROUP_SIZE))
    policy.end_step(max_level=0)
    assert policy.level == 0


def test_a_band_draws_most_from_the_level_that_teaches_most_and_leaves_none_out() -> None:
    policy = BandPolicy(3, 4)
    for level, num_correct in ((0, 8), (1, 7), (2, 4), (3, 0)):
        for _ in range(30):
            policy.observe(LevelOutcome(level=level, num_judged=GROUP_SIZE, num_correct=num_correct))
    weights = policy.weights()
    assert max(weights, key=lambda level: weights[level]) == 2
    assert weights[2] > 0.75 * sum(weights.values())
    assert min(weights.values()) > 0.02


def test_learning_progress_goes_back_to_a_level_that_is_forgotten() -> None:
    policy, random = LearningProgressPolicy(0, 1), Random(4)
    play(policy, solved_up_to(7), num_steps=150, random=random)
    assert sorted(policy.weights())[0] < 7
    play(policy, lambda level: 0.0 if level == 3 else solved_up_to(7)(level), num_steps=3, random=random)
    for _ in range(3):
        policy.observe(LevelOutcome(level=3, num_judged=GROUP_SIZE, num_correct=0))
    weights = policy.weights()
    assert max(weights, key=lambda level: weights[level]) == 3


@pytest.mark.parametrize("make", [BandPolicy, LearningProgressPolicy])
def test_a_policy_goes_on_from_its_state_as_if_never_stopped(make: Callable[..., DifficultyPolicy]) -> None:
    unbroken, stopped = make(0, 4), make(0, 4)
    expected = play(unbroken, solved_up_to(8), num_steps=60, random=Random(5))
    random, found = Random(5), []
    for _ in range(6):
        found += play(stopped, solved_up_to(8), num_steps=10, random=random)
        state = json.loads(json.dumps(stopped.state_dict()))
        stopped = make(0, 4)
        stopped.load_state_dict(state)
    assert found == expected
    assert stopped.state_dict() == unbroken.state_dict()
    assert stopped.weights() == unbroken.weights()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("accuracy", "up", "down"), [(0.3, 0.0, 0.0), (0.5, 0.0, 0.0), (0.8, 1.0, 0.0), (0.9, 1.0, 0.0), (0.05, 0.0, 1.0)]
)
def test_over_ten_thousand_groups_a_band_hardly_ever_moves_the_wrong_way(
    accuracy: float, up: float, down: float
) -> None:
    random, went_up, went_down = Random(1), 0, 0
    for _ in range(100):
        levels = play(BandPolicy(50, 1), lambda level: accuracy, num_steps=25, random=random)
        went_up += max(levels) > 50
        went_down += min(levels) < 50
    assert abs(went_up / 100 - up) <= 0.03
    assert abs(went_down / 100 - down) <= 0.03
