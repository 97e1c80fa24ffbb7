from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from rollfeed.errors import ConfigError
from rollfeed.pipeline import LengthHistory
from rollfeed.testing import make_group
from rollfeed.types import Group, Prompt


def row(number: int, *, epoch: int = 0, source: str = "math") -> Prompt:
    return Prompt(
        prompt_id=f"{source}/{number}@e{epoch}", source=source, text="?", token_ids=np.array([1], dtype=np.int32)
    )


def problem(index: int, *, level: int) -> Prompt:
    return Prompt(
        prompt_id=f"core/words/train/{index}",
        source="core/words",
        text="?",
        token_ids=np.array([1], dtype=np.int32),
        metadata={"environment": "core/words", "level": level},
    )


def draws(*prompts: Prompt) -> list[Group]:
    return [Group(index, prompt) for index, prompt in enumerate(prompts)]


def order(history: LengthHistory, *prompts: Prompt) -> list[int]:
    return [draw.group_index for draw in history.order(draws(*prompts))]


def test_a_prompt_is_known_again_in_the_next_epoch() -> None:
    history = LengthHistory()
    history.observe(row(3, epoch=0), [10, 30])
    assert history.predict(row(3, epoch=1)) == 20.0
    assert history.predict(row(4)) is None
    assert history.predict(row(3, source="code")) is None


def test_a_problem_is_known_by_its_level() -> None:
    history = LengthHistory()
    history.observe(problem(0, level=2), [50])
    assert history.predict(problem(9, level=2)) == 50.0
    assert history.predict(problem(0, level=3)) is None
    assert len(history.state_dict()["prompts"]) == 1


def test_the_mean_is_plain_at_first_and_exponential_later() -> None:
    history = LengthHistory()
    for length in (10, 20, 30):
        history.observe(row(0), [length])
    assert history.predict(row(0)) == pytest.approx(20.0)
    for _ in range(60):
        history.observe(row(0), [100])
    assert history.predict(row(0)) == pytest.approx(100.0, abs=0.1)


def test_the_longest_start_first_and_equals_stay_in_order() -> None:
    history = LengthHistory()
    for number, length in enumerate((10, 40, 40, 90)):
        history.observe(row(number), [length])
    assert order(history, row(0), row(2), row(1), row(3)) == [3, 1, 2, 0]


def test_an_unknown_prompt_counts_as_the_mean_of_its_source() -> None:
    history = LengthHistory()
    assert order(history, row(5), row(4), row(6)) == [0, 1, 2]
    for number, length in enumerate((10, 30)):
        history.observe(row(number), [length])
    history.observe(row(0, source="code"), [100])
    history.observe(row(1, source="code"), [300])
    # code/0 = 100, math/0 = 10, code unknown = 200, math unknown = 20, another source = the mean of all, 110.
    prompts = (row(0, source="code"), row(0), row(7, source="code"), row(7), row(0, source="other"))
    assert order(history, *prompts) == [2, 4, 0, 3, 1]


def test_only_rollouts_that_ended_by_themselves_teach() -> None:
    history, group = LengthHistory(), make_group([1.0, 0.0])
    history.learn(group)
    assert history.predict(group.prompt) == 1.0
    history.observe(row(0), [])
    assert len(history.state_dict()["prompts"]) == 1


def test_the_prompts_seen_least_recently_are_forgotten() -> None:
    history = LengthHistory(max_prompts=3)
    for number in (0, 1, 2, 0, 3):
        history.observe(row(number), [number + 1])
    assert [history.predict(row(number)) is not None for number in range(4)] == [True, False, True, True]
    for number in range(1000):
        history.observe(row(number, source=f"source {number}"), [5])
    assert len(history.state_dict()["prompts"]) == 3
    assert all(len(part) <= 1024 for part in history.state_dict().values())


def test_a_fifth_of_the_prompts_is_long() -> None:
    history = LengthHistory()
    assert not history.is_long(row(0))
    for number in range(100):
        history.observe(row(number), [number])
    assert [number for number in range(100) if history.is_long(row(number))] == list(range(80, 100))
    assert not history.is_long(row(1000))


def test_long_is_what_is_long_now() -> None:
    history = LengthHistory()
    for number in range(5000):
        history.observe(row(number), [number])
    assert not history.is_long(row(3900))
    assert history.is_long(row(4900))


@pytest.mark.parametrize("by_level", [False, True])
def test_the_order_correlates_with_lognormal_lengths(by_level: bool) -> None:
    """Each prompt has a typical length, and answers scatter around it; a few groups later the order is known."""
    random = np.random.default_rng(1)
    typical = np.exp(random.normal(5.3, 0.9, size=64))
    prompts = [problem(number, level=number) if by_level else row(number) for number in range(64)]

    def lengths(number: int) -> list[int]:
        return [int(length) for length in typical[number] * np.exp(random.normal(0.0, 0.5, size=8))]

    history = LengthHistory()
    for _ in range(3):
        for number in random.permutation(64):
            history.observe(prompts[number], lengths(int(number)))
    predicted = [history.predict(prompt) for prompt in prompts]
    upcoming = [float(np.mean(lengths(number))) for number in range(64)]
    assert spearmanr(predicted, upcoming).statistic > 0.9
    places = np.argsort(order(history, *prompts))
    assert spearmanr(places, upcoming).statistic < -0.9
    long = {number for number, prompt in enumerate(prompts) if history.is_long(prompt)}
    longest = set(np.argsort(typical)[-len(long) :].tolist())
    assert 6 <= len(long) <= 20
    assert len(long & longest) / len(long) > 0.7


def learned() -> LengthHistory:
    history, random = LengthHistory(max_prompts=50), np.random.default_rng(2)
    for number in random.integers(0, 80, size=500):
        history.observe(row(int(number)), [int(length) for length in random.lognormal(5.0, 1.0, size=4)])
    return history


def test_the_same_observations_give_the_same_state() -> None:
    assert learned().state_dict() == learned().state_dict()


def test_a_history_goes_on_from_its_state_as_if_unbroken() -> None:
    history, restored = learned(), LengthHistory(max_prompts=50)
    restored.observe(row(999), [7])
    restored.load_state_dict(json.loads(json.dumps(history.state_dict())))
    prompts = [row(number, epoch=3) for number in range(80)]
    for one in (history, restored):
        one.observe(row(3), [11, 12])
        one.observe(row(100), [500])
    assert restored.state_dict() == history.state_dict()
    assert order(restored, *prompts) == order(history, *prompts)
    assert list(map(restored.is_long, prompts)) == list(map(history.is_long, prompts))


def test_a_smaller_history_keeps_what_was_seen_last() -> None:
    smaller = LengthHistory(max_prompts=10)
    smaller.load_state_dict(learned().state_dict())
    assert smaller.state_dict()["prompts"] == learned().state_dict()["prompts"][-10:]


@pytest.mark.parametrize(
    "damage",
    [lambda state: state.pop("recent"), lambda state: state["prompts"].append(["a"]), lambda state: state.clear()],
)
def test_a_state_that_is_none_changes_nothing(damage: Callable[[dict[str, Any]], object]) -> None:
    history = learned()
    state = history.state_dict()
    damage(state)
    with pytest.raises(ConfigError, match="history of response lengths cannot be read"):
        history.load_state_dict(state)
    assert history.state_dict() == learned().state_dict()
