from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from rollfeed.environments.levels import EnvironmentLevels
from rollfeed.environments.making import TaskFailedError, TaskFailureKind, TaskMaker
from rollfeed.errors import SourceFailedError
from rollfeed.protocols import PromptRenderer, Task
from rollfeed.types import Prompt

MakeLevels = Callable[..., EnvironmentLevels]


class Scripted(TaskMaker):
    """Fails at the problems that a script names, by level and index."""

    def __init__(self, environment: Any, script: dict[tuple[int, int], TaskFailureKind]) -> None:
        super().__init__(environment, run_seed=1)
        self.script = script
        self.asked: list[tuple[int, int]] = []

    async def make(self, *, level: int, index: int, split: str = "train") -> Task:
        self.asked.append((level, index))
        if (level, index) in self.script:
            raise TaskFailedError(self.script[level, index], "as the script says")
        return await super().make(level=level, index=index, split=split)


@pytest.fixture
def make_levels(parity: Any, make_renderer: Callable[..., PromptRenderer]) -> MakeLevels:
    def make(script: Any = (), *, limit: int | None = None, maker: Any = None) -> EnvironmentLevels:
        maker = maker or Scripted(parity, dict(script))
        return EnvironmentLevels(maker, renderer=make_renderer(limit), source="parity")

    return make


def failing(level: int, indices: range, kind: TaskFailureKind = TaskFailureKind.RAISED) -> Any:
    return {(level, index): kind for index in indices}


def place(prompt: Prompt) -> tuple[int, int]:
    return prompt.metadata["level"], int(prompt.prompt_id.rpartition("/")[2])


async def test_four_failures_in_a_row_are_passed_over(make_levels: MakeLevels) -> None:
    levels = make_levels(failing(2, range(4)) | failing(2, range(8, 12)))
    drawn = [place(await levels.draw(2)) for _ in range(8)]
    assert {level for level, _ in drawn} == {2}
    assert not {index for _, index in drawn} & {*range(4), *range(8, 12)}
    assert levels.failures == {"raised": 8}
    assert levels.metrics() == {"environments/my/parity/raised": 8.0}


@pytest.mark.parametrize(
    ("kind", "count", "told"),
    [
        ("raised", 5, "5 problems in a row cannot be used"),
        ("nothing", 5, "5 problems in a row cannot be used"),
        ("timed_out", 3, "3 of 3 problems had to be killed"),
        ("died", 3, "3 of 3 problems had to be killed"),
    ],
)
async def test_a_level_that_fails_in_a_row_is_given_up_and_the_next_lower_one_is_drawn(
    make_levels: MakeLevels, kind: str, count: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    levels = make_levels(failing(3, range(100), TaskFailureKind(kind)))
    assert [place(await levels.draw(3))[0] for _ in range(20)] == [2] * 20
    assert (levels.hardest, levels.failures) == (2, {kind: count})
    assert place(await levels.draw(7))[0] == 2
    assert levels.metrics()["environments/my/parity/hardest"] == 2.0
    assert len(caplog.records) == 1
    assert f"parity: goes on at level 2: level 3: {told} (problem {count - 1}: as the script says)" in caplog.text


@pytest.mark.parametrize(("indices", "is_given_up"), [((4, 60, 103), True), ((4, 60, 104), False)])
async def test_a_level_is_given_up_where_three_of_a_hundred_problems_are_killed(
    make_levels: MakeLevels, indices: tuple[int, ...], is_given_up: bool
) -> None:
    levels = make_levels({(1, index): TaskFailureKind.TIMED_OUT for index in indices})
    for _ in range(120):
        await levels.draw(1)
    assert (levels.hardest == 0) is is_given_up


async def test_an_environment_without_a_level_left_says_why(make_levels: MakeLevels) -> None:
    levels = make_levels({key: kind for level in range(3) for key, kind in failing(level, range(9)).items()})
    for _ in range(2):
        with pytest.raises(
            SourceFailedError, match=r"my/parity: no level is left: level 0: 5 problems in a row .*script"
        ):
            await levels.draw(2)
    assert levels.hardest == -1
    assert levels.failures == {"raised": 15}  # nothing is tried again


async def test_prompts_over_the_limit_are_failures_of_their_level(make_levels: MakeLevels) -> None:
    levels = make_levels(limit=len("<user>Is 123 even or odd?"))
    assert place(await levels.draw(9))[0] <= 3
    assert set(levels.failures) == {"too_long"}
    assert levels.failures["too_long"] >= 5


@pytest.mark.parametrize("seed", range(5))
async def test_stopped_anywhere_it_goes_on_as_if_it_had_not(make_levels: MakeLevels, seed: int) -> None:
    random = Random(seed)
    script = {
        (level, index): random.choice(list(TaskFailureKind))
        for level in range(6)
        for index in range(200)
        if random.random() < 0.5
    }
    wanted = [random.randrange(6) for _ in range(100)]

    async def draw(levels: EnvironmentLevels, wanted: list[int]) -> list[Any]:
        drawn: list[Any] = []
        for level in wanted:
            try:
                drawn.append(place(await levels.draw(level)))
            except SourceFailedError as error:
                drawn.append(str(error))
        return drawn

    unbroken = make_levels(script)
    expected = await draw(unbroken, wanted)
    assert unbroken.hardest != unbroken.facts.max_level  # something was given up
    levels, drawn = make_levels(script), list[Any]()
    while len(drawn) < len(wanted):
        drawn += await draw(levels, wanted[len(drawn) :][: random.randint(1, 9)])
        state = json.loads(json.dumps(levels.state_dict()))
        levels = make_levels(script)
        levels.load_state_dict(state)
    assert drawn == expected
    assert levels.state_dict() == unbroken.state_dict()
    assert levels.num_made == unbroken.num_made


async def test_an_index_that_failed_is_not_asked_for_again(make_levels: MakeLevels, parity: Any) -> None:
    maker = Scripted(parity, failing(1, range(2, 5)))
    levels = make_levels(maker=maker)
    for _ in range(10):
        await levels.draw(1)
    assert maker.asked == [(1, index) for index in range(len(maker.asked))]
