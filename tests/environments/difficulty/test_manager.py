from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rollfeed.environments.difficulty import DifficultyManager
from rollfeed.environments.difficulty.rlve import FixedPolicy, RlvePolicy
from rollfeed.types import Group

Answered = Callable[..., Group]
ALL = {"my/a": None, "my/b": None}


def make(policy: Callable[[], Any] = lambda: FixedPolicy(3, 4), **settings: Any) -> DifficultyManager:
    return DifficultyManager({"my/a": 1, "my/b": 1}, policy_name="x", make_policy=policy, **{"seed": 1, **settings})


def rows(manager: DifficultyManager, name: str = "my/a") -> list[list[int]]:
    return manager.environments[name].state_dict()["levels"]  # type: ignore[no-any-return]


def test_draws_are_uniform_over_environments_and_levels_and_depend_on_the_seed() -> None:
    drawn = Counter(make().choose(number, hardest=ALL) for number in range(4000))
    assert set(drawn) == {(name, level) for name in ALL for level in range(4)}
    assert min(drawn.values()) > 400
    assert Counter(make(seed=2).choose(number, hardest=ALL) for number in range(4000)) != drawn


def test_levels_over_the_hardest_that_can_be_made_are_not_drawn() -> None:
    drawn = {make().choose(number, hardest={"my/a": 1}) for number in range(100)}
    assert drawn == {("my/a", 0), ("my/a", 1)}
    high = make(lambda: FixedPolicy(9, 2))
    assert high.choose(0, hardest={"my/a": 5}) == ("my/a", 5)


def test_environments_whose_groups_have_no_spread_are_drawn_less_and_not_never(answered: Answered) -> None:
    manager = make(weight_by_spread=True)
    for _ in range(200):
        manager.observe(answered([True, False], environment="my/a"))
        manager.observe(answered([False, False], environment="my/b"))
    drawn = Counter(manager.choose(number, hardest=ALL)[0] for number in range(2000))
    assert 50 < drawn["my/b"] < 200


def test_the_table_counts_by_level(answered: Answered) -> None:
    manager = make()
    manager.observe(answered([True, False, True], level=1))
    manager.observe(answered([True, True, True], level=1))
    manager.observe(answered([False, False, None], level=2))
    assert rows(manager) == [[1, 2, 6, 5, 0, 1, 0], [2, 1, 2, 0, 0, 0, 1]]
    assert rows(manager, "my/b") == []


@pytest.mark.parametrize("strange", [{"environment": "my/gone"}, {"version": 2}, {"policy": 1, "level": 0}], ids=str)
def test_what_is_of_no_use_here_is_not_counted(answered: Answered, strange: dict[str, Any]) -> None:
    manager = make(max_staleness=3)
    manager.observe(answered([True], policy=5))
    manager.observe(answered([False], **{"policy": 5, **strange}))
    assert rows(manager) == [[0, 1, 1, 1, 0, 1, 0]]


def test_groups_of_policies_not_too_old_count(answered: Answered) -> None:
    manager = make(max_staleness=3)
    manager.observe(answered([True], policy=5))
    manager.observe(answered([True], policy=2))
    assert rows(manager) == [[0, 2, 2, 2, 0, 2, 0]]


def test_verdicts_without_right_and_wrong_are_told_of_once(
    answered: Answered, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make()
    for _ in range(3):
        manager.observe(answered([None, None]))
    assert rows(manager) == []
    assert len(caplog.records) == 1
    assert "no verdict says whether answers are right" in caplog.text


def test_metrics_tell_accuracies_at_checks_and_levels_at_changes(answered: Answered) -> None:
    def policy() -> RlvePolicy:
        return RlvePolicy(0, 4, least_accuracy=0.9, least_rollouts=4)

    manager = make(policy)
    manager.observe(answered([True, True]))
    assert manager.end_step(hardest=ALL) == {}
    manager.observe(answered([True, True]))
    manager.observe(answered([True, False, True, True], environment="my/b"))
    assert manager.end_step(hardest=ALL) == {
        "RLVE/my/a/accuracy": 1.0,
        "RLVE/my/a/difficulty": 1.0,
        "RLVE/my/b/accuracy": 0.75,
    }


def test_a_level_that_cannot_be_made_any_more_lowers_the_policys() -> None:
    manager = make()
    assert manager.end_step(hardest={"my/a": 1, "my/b": -1}) == {
        "RLVE/my/a/difficulty": 1.0,
        "RLVE/my/b/difficulty": 0.0,
    }
