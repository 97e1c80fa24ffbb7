from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from rollfeed.environments.adaptive_source import AdaptiveSource
from rollfeed.environments.difficulty import DifficultyManager
from rollfeed.environments.difficulty.band import BandPolicy
from rollfeed.environments.difficulty.rlve import FixedPolicy, RlvePolicy
from rollfeed.environments.levels import EnvironmentLevels
from rollfeed.environments.making import TaskFailedError, TaskFailureKind, TaskMaker
from rollfeed.errors import ConfigError, SourceFailedError
from rollfeed.protocols import DifficultyPolicy, PromptRenderer, Task
from rollfeed.testing import check_prompt_source, make_group
from rollfeed.types import Correct, Group, Prompt, Verdict

MakeSource = Callable[..., AdaptiveSource]


class Breaking(TaskMaker):
    """Fails at some levels; remembers what it was told to prepare."""

    def __init__(self, environment: Any, broken: Sequence[int], *, seed: int) -> None:
        super().__init__(environment, run_seed=seed)
        self.broken = broken
        self.prepared: list[int] = []
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True

    async def make(self, *, level: int, index: int, split: str = "train") -> Task:
        if level in self.broken:
            raise TaskFailedError(TaskFailureKind.RAISED, "it is broken")
        return await super().make(level=level, index=index, split=split)

    def prefetch(self, *, level: int, index: int, split: str = "train") -> None:
        self.prepared.append(level)


@pytest.fixture
def make_source(parity: Any, make_renderer: Callable[..., PromptRenderer]) -> MakeSource:
    def make(
        names: Sequence[str] = ("my/a", "my/b"),
        *,
        seed: int = 1,
        policy: Callable[[], DifficultyPolicy] = lambda: FixedPolicy(3, 4),
        policy_name: str = "fixed",
        broken: dict[str, Sequence[int]] | None = None,
        versions: dict[str, int] | None = None,
    ) -> AdaptiveSource:
        makers = []
        for name in names:
            environment = type(parity)()
            environment.environment_id, environment.version = name, (versions or {}).get(name, 1)
            makers.append(Breaking(environment, (broken or {}).get(name, ()), seed=seed))
        manager = DifficultyManager(
            {maker.facts.environment_id: maker.facts.version for maker in makers},
            policy_name=policy_name,
            make_policy=policy,
            seed=seed,
        )
        levels = [EnvironmentLevels(maker, renderer=make_renderer(), source="adaptive") for maker in makers]
        return AdaptiveSource(levels, manager=manager)

    return make


def rlve() -> RlvePolicy:
    return RlvePolicy(0, 4, least_accuracy=0.9, least_rollouts=8)


def answered(prompt: Prompt, *right: bool) -> Group:
    group = make_group([float(each) for each in right], prompt=prompt)
    verdicts = [Verdict(reward=float(each), correct=Correct.YES if each else Correct.NO) for each in right]
    rollouts = [rollout.with_reward(verdict) for rollout, verdict in zip(group.rollouts, verdicts, strict=True)]
    return Group(group.group_index, prompt, tuple(rollouts))


def place(prompt: Prompt) -> tuple[str, int]:
    return prompt.metadata["environment"], prompt.metadata["level"]


async def steps(source: AdaptiveSource, num_steps: int, random: Random, *, size: int = 8) -> list[str]:
    """Draw and answer; what is right depends on the problem only."""
    ids = []
    for _ in range(num_steps):
        for prompt in await source.draw(size):
            ids.append(prompt.prompt_id)
            chance = Random(prompt.prompt_id).random() * 2 if prompt.metadata["level"] < 3 else 0.4
            source.learn(answered(prompt, *[Random(f"{prompt.prompt_id} {n}").random() < chance for n in range(4)]))
        source.end_step()
    return ids


async def test_the_contract_of_sources_holds(make_source: MakeSource) -> None:
    await check_prompt_source(make_source, count=40)


async def test_prompts_are_of_the_source_and_say_environment_and_level(make_source: MakeSource) -> None:
    prompts = await make_source().draw(400)
    assert {prompt.source for prompt in prompts} == {"adaptive"}
    assert len({prompt.prompt_id for prompt in prompts}) == 400
    assert set(Counter(map(place, prompts))) == {(name, level) for name in ("my/a", "my/b") for level in range(4)}


async def test_another_seed_gives_other_draws(make_source: MakeSource) -> None:
    first, second = await make_source().draw(50), await make_source(seed=2).draw(50)
    assert [place(prompt) for prompt in first] != [place(prompt) for prompt in second]


@pytest.mark.parametrize("stop", [1, 7, 20])
async def test_a_source_goes_on_as_if_never_stopped_with_what_it_has_learned(
    make_source: MakeSource, stop: int
) -> None:
    def make() -> AdaptiveSource:
        return make_source(policy=lambda: BandPolicy(0, 4), policy_name="band")

    unbroken, stopped, random = make(), make(), Random(0)
    expected = await steps(unbroken, 40, random)
    found = await steps(stopped, stop, random)
    again = make()
    again.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert found + await steps(again, 40 - stop, random) == expected
    assert again.state_dict() == unbroken.state_dict()
    assert len({prompt_id.split("/train")[0] for prompt_id in expected}) > 4, "levels changed on the way"


async def test_levels_change_when_a_step_ends_and_not_before(make_source: MakeSource) -> None:
    source = make_source(["my/a"], policy=rlve)
    prompts = await source.draw(4)
    for prompt in prompts:
        source.learn(answered(prompt, True, True, True, True))
    assert {place(prompt) for prompt in await source.draw(20)} == {("my/a", 0)}
    source.end_step()
    assert source.metrics() == {
        "RLVE/my/a/accuracy": 1.0,
        "RLVE/my/a/difficulty": 1.0,
        "rollout/problem_generation_seed": source.state_dict()["environments"]["my/a"]["problems"]["levels"]["0"][0],
    }
    assert {place(prompt) for prompt in await source.draw(20)} == {("my/a", 0), ("my/a", 1)}


async def test_a_broken_level_and_harder_ones_are_left_out(
    make_source: MakeSource, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_source(broken={"my/a": [2]})
    await source.draw(100)  # until it is found
    assert {place(prompt) for prompt in await source.draw(200)} == {
        *(("my/a", level) for level in range(2)),
        *(("my/b", level) for level in range(4)),
    }
    assert "my/a: level 2: 5 problems in a row cannot be used" in caplog.text
    assert "its levels up to 1 are left" in caplog.text
    source.end_step()
    metrics = source.metrics()
    assert metrics["RLVE/my/a/difficulty"] == 1.0
    assert metrics["environments/my/a/raised"] == 5.0


async def test_an_environment_without_any_level_leaves_the_draws_to_the_others(
    make_source: MakeSource, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_source(broken={"my/a": range(4)})
    assert {prompt.metadata["environment"] for prompt in await source.draw(200)} == {"my/b"}
    assert "my/a: level 0: " in caplog.text
    again = make_source(broken={"my/a": range(4)})
    again.load_state_dict(source.state_dict())
    assert {prompt.metadata["environment"] for prompt in await again.draw(200)} == {"my/b"}


async def test_a_source_without_any_environment_left_says_why(make_source: MakeSource) -> None:
    source = make_source(["my/a"], broken={"my/a": range(4)})
    with pytest.raises(SourceFailedError, match=r"no environment can make problems any more: my/a: level 0: .*broken"):
        await source.draw(1)


class BrokenLater(list[int]):
    """Has no level until it was asked once, and every one from then on."""

    def __contains__(self, level: object) -> bool:
        self.append(0)
        return len(self) > 1


async def test_what_was_drawn_before_none_was_left_is_handed_out(make_source: MakeSource) -> None:
    source = make_source(["my/a"], broken={"my/a": BrokenLater()})
    drawn = await source.draw(3)
    assert [each.prompt_id for each in drawn] == [each.prompt_id for each in await make_source(["my/a"]).draw(1)]
    with pytest.raises(SourceFailedError, match="no environment can make problems any more"):
        await source.draw(1)


async def test_problems_of_the_next_draws_are_prepared(make_source: MakeSource) -> None:
    source = make_source(["my/a"])
    maker: Any = source._levels["my/a"].maker
    await source.draw(1)
    prepared = list(maker.prepared)
    assert [level for _, level in map(place, await make_source(["my/a"]).draw(17))] == prepared


async def test_an_environment_that_is_added_begins_and_others_go_on(make_source: MakeSource) -> None:
    source = make_source(["my/a"], policy=rlve)
    for _ in range(3):
        for prompt in await source.draw(8):
            source.learn(answered(prompt, True, True))
        source.end_step()
    state = json.loads(json.dumps(source.state_dict()))
    wider = make_source(["my/a", "my/b"], policy=rlve)
    wider.load_state_dict(state)
    drawn = {place(prompt) for prompt in await wider.draw(200)}
    assert {level for name, level in drawn if name == "my/b"} == {0}
    assert (
        max(level for name, level in drawn if name == "my/a")
        == source.state_dict()["environments"]["my/a"]["difficulty"]["policy"]["level"]
    )


async def test_an_environment_that_was_away_goes_on_where_it_was(make_source: MakeSource) -> None:
    source = make_source(["my/a", "my/b"])
    await source.draw(30)
    before = source.state_dict()["environments"]["my/b"]
    narrow = make_source(["my/a"])
    narrow.load_state_dict(source.state_dict())
    await narrow.draw(10)
    assert narrow.state_dict()["environments"]["my/b"] == before
    again = make_source(["my/a", "my/b"])
    again.load_state_dict(narrow.state_dict())
    assert again.state_dict()["environments"]["my/b"] == before


async def test_another_version_of_an_environment_begins_anew_and_says_so(
    make_source: MakeSource, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_source()
    await source.draw(30)
    newer = make_source(versions={"my/a": 2})
    newer.load_state_dict(source.state_dict())
    state = newer.state_dict()["environments"]
    assert state["my/a"]["problems"]["levels"] == {}
    assert state["my/b"] == source.state_dict()["environments"]["my/b"]
    assert "environment my/a: the run was of its version 1, installed is 2" in caplog.text


async def test_another_policy_goes_on_from_the_levels(make_source: MakeSource) -> None:
    source = make_source(policy=rlve, policy_name="rlve")
    for prompt in await source.draw(40):
        source.learn(answered(prompt, True, True))
    source.end_step()
    band = make_source(policy=lambda: BandPolicy(0, 4), policy_name="band")
    band.load_state_dict(source.state_dict())
    assert band.state_dict()["environments"]["my/a"]["difficulty"]["policy"] == {
        "level": 1,
        "num_new": 0,
        "is_falling": False,
        "estimates": {},
    }


async def test_a_source_that_was_used_goes_to_a_state_all_the_same(make_source: MakeSource) -> None:
    source, used = make_source(), make_source(seed=1)
    await source.draw(30)
    state = source.state_dict()
    await used.draw(7)
    used.load_state_dict(state)
    assert [each.prompt_id for each in await used.draw(30)] == [each.prompt_id for each in await source.draw(30)]


async def test_leaving_a_source_ends_what_is_made_ahead(make_source: MakeSource) -> None:
    source = make_source()
    makers: list[Any] = [levels.maker for levels in source._levels.values()]
    async with source:
        await source.draw(1)
        assert not any(maker.is_closed for maker in makers)
    assert all(maker.is_closed for maker in makers)


def test_a_state_of_another_form_is_refused(make_source: MakeSource) -> None:
    with pytest.raises(ConfigError, match="another version of rollfeed"):
        make_source().load_state_dict({**make_source().state_dict(), "schema": 0})
