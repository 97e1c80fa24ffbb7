from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rollfeed.errors import ConfigError, SourceFailedError
from rollfeed.prompts import MixtureSource
from rollfeed.protocols import PromptSource
from rollfeed.types import Prompt


class Counting(PromptSource):
    """A source of numbered prompts that ends after ``size`` of them."""

    def __init__(self, name: str, size: int | None = None) -> None:
        self._name = name
        self._size = size
        self._next = 0

    async def draw(self, count: int) -> list[Prompt]:
        end = self._next + count if self._size is None else min(self._next + count, self._size)
        numbers, self._next = range(self._next, end), end
        return [
            Prompt(prompt_id=f"{self._name}/{n}", source=self._name, text="", token_ids=np.zeros(1, np.int32))
            for n in numbers
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]


def mixture(*, seed: int = 0, **sizes: int | None) -> MixtureSource:
    weights = {"a": 1.0, "b": 2.0, "c": 3.0}
    return MixtureSource([(name, weights[name], Counting(name, size)) for name, size in sizes.items()], seed=seed)


async def ids_in_draws(source: MixtureSource, draws: list[int]) -> list[str]:
    return [prompt.prompt_id for count in draws for prompt in await source.draw(count)]


async def test_shares_follow_the_weights() -> None:
    prompts = await mixture(a=None, b=None, c=None).draw(6000)
    counts = Counter(prompt.source for prompt in prompts)
    assert counts["a"] == pytest.approx(1000, abs=100)
    assert counts["b"] == pytest.approx(2000, abs=130)
    assert counts["c"] == pytest.approx(3000, abs=130)


@pytest.mark.parametrize("draws", [[60], [1] * 60, [7] * 8 + [4], [0, 59, 1]])
async def test_order_does_not_depend_on_how_many_are_drawn_at_a_time(draws: list[int]) -> None:
    reference = await ids_in_draws(mixture(a=4, b=9, c=None), [20, 20, 20])
    assert await ids_in_draws(mixture(a=4, b=9, c=None), draws) == reference


async def test_each_source_keeps_its_own_order() -> None:
    ids = await ids_in_draws(mixture(a=None, b=None), [50])
    for name in "ab":
        own = [prompt_id for prompt_id in ids if prompt_id.startswith(name)]
        assert own == [f"{name}/{number}" for number in range(len(own))]


async def test_seed_changes_the_order() -> None:
    first = await ids_in_draws(mixture(a=None, b=None, seed=1), [50])
    assert first != await ids_in_draws(mixture(a=None, b=None, seed=2), [50])


async def test_ended_source_is_left_out_and_the_mixture_ends_with_the_last() -> None:
    source = mixture(a=3, b=5)
    prompts = await source.draw(100)
    assert Counter(prompt.source for prompt in prompts) == {"a": 3, "b": 5}
    assert await source.draw(1) == []


@pytest.mark.parametrize("stop", range(1, 25))
async def test_order_after_resuming_equals_an_unbroken_run(stop: int) -> None:
    unbroken = await ids_in_draws(mixture(a=4, b=8, c=None), [40])
    first, second = mixture(a=4, b=8, c=None), mixture(a=4, b=8, c=None)
    ids = await ids_in_draws(first, [stop])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert ids + await ids_in_draws(second, [40 - stop]) == unbroken


async def test_state_is_merged_by_name() -> None:
    first = mixture(a=None, b=None)
    ids = await ids_in_draws(first, [20])
    reordered = MixtureSource([("b", 2.0, Counting("b")), ("a", 1.0, Counting("a"))], seed=0)
    reordered.load_state_dict(first.state_dict())
    assert not set(ids) & set(await ids_in_draws(reordered, [20]))


def test_new_and_gone_sources_are_refused_by_name() -> None:
    state = mixture(a=None, b=None).state_dict()
    with pytest.raises(ConfigError, match="'c' is new, 'b' is gone: restore them, or start a new run"):
        mixture(a=None, c=None).load_state_dict(state)


def test_mixture_without_sources_is_refused() -> None:
    with pytest.raises(ConfigError, match="no prompt source"):
        MixtureSource([], seed=0)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weight_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"'a': weight = .*: must be above 0"):
        MixtureSource([("a", weight, Counting("a"))], seed=0)


def test_two_sources_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two prompt sources are called 'a'"):
        MixtureSource([("a", 1.0, Counting("a")), ("a", 1.0, Counting("a"))], seed=0)


class Failing(Counting):
    """A source that cannot go on where it would end."""

    async def draw(self, count: int) -> list[Prompt]:
        if not (prompts := await super().draw(count)):
            raise SourceFailedError(f"{self._name} is broken")
        return prompts


async def test_a_source_that_fails_is_left_out_and_said_when_nothing_is_left(caplog: pytest.LogCaptureFixture) -> None:
    source = MixtureSource([("a", 1.0, Failing("a", 2)), ("b", 1.0, Counting("b", 9))], seed=0)
    drawn = await ids_in_draws(source, [5, 20])
    assert sorted(drawn) == sorted([f"a/{n}" for n in range(2)] + [f"b/{n}" for n in range(9)])
    assert [record.message for record in caplog.records] == ["prompt source a is left out from now on: a is broken"]
    for _ in range(2):
        with pytest.raises(SourceFailedError, match="no prompt source is left: a is broken"):
            await source.draw(1)


async def test_sources_and_resources_are_entered_and_left_in_order() -> None:
    told: list[str] = []

    class Opened(Counting):
        async def __aenter__(self) -> None:
            told.append(f"enter {self._name}")

        async def __aexit__(self, *exc_info: object) -> None:
            told.append(f"leave {self._name}")

    async with MixtureSource([("a", 1.0, Opened("a")), ("b", 1.0, Counting("b"))], seed=0, resources=[Opened("pool")]):
        told.append("run")
    assert told == ["enter pool", "enter a", "run", "leave a", "leave pool"]
