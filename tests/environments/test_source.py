from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rollfeed.environments import RM_TYPE, EnvironmentGrader, EnvironmentSource
from rollfeed.errors import ConfigError, SourceFailedError
from rollfeed.protocols import PromptRenderer
from rollfeed.types import Correct, Verdict


@pytest.fixture
def make_source(parity: Any, make_renderer: Callable[..., PromptRenderer]) -> Callable[..., EnvironmentSource]:
    def make(environment: Any = parity, *, limit: int | None = None, **settings: Any) -> EnvironmentSource:
        return EnvironmentSource(environment, renderer=make_renderer(limit), **{"level": 0, "seed": 1} | settings)

    return make


async def test_prompts_say_where_they_come_from(make_source: Callable[..., EnvironmentSource]) -> None:
    first, second = await make_source(level=2, seed=2).draw(2)
    assert (first.prompt_id, second.prompt_id) == ("my/parity@2/train/0", "my/parity@2/train/1")
    assert first.source == "my/parity@2"
    assert first.text == f"<user>{first.messages[0]['content']}"  # type: ignore[index]
    assert first.metadata["rm_type"] == RM_TYPE
    assert (first.metadata["environment"], first.metadata["version"], first.metadata["level"]) == ("my/parity", 3, 2)
    assert first.metadata["seed"] != second.metadata["seed"]


async def test_prompts_are_graded_after_a_json_round_trip(
    make_source: Callable[..., EnvironmentSource], make_grader: Callable[..., EnvironmentGrader], parity: Any
) -> None:
    grade = make_grader(parity)
    for prompt in await make_source().draw(20):
        metadata = json.loads(json.dumps(prompt.metadata))
        assert (await grade(str(prompt.label), prompt.label, metadata)).correct is Correct.YES


def test_a_template_that_refuses_a_problem_is_named_with_the_environment(parity: Any) -> None:
    class Refusing:
        def render(self, content: Any, **settings: Any) -> Any:
            raise ConfigError("the model's chat template refuses the messages: system first")

    with pytest.raises(ConfigError, match=r"environment my/parity@0: the model's chat template refuses"):
        EnvironmentSource(parity, level=0, seed=1, renderer=Refusing())  # type: ignore[arg-type]


async def test_raw_text_goes_without_messages(make_source: Callable[..., EnvironmentSource]) -> None:
    (prompt,) = await make_source(apply_chat_template=False).draw(1)
    assert prompt.text.startswith("Is ")
    assert prompt.messages is None


@pytest.mark.parametrize("stop", range(1, 7))
async def test_restored_source_goes_on_as_if_never_stopped(
    make_source: Callable[..., EnvironmentSource], stop: int
) -> None:
    unbroken = [prompt.text for prompt in await make_source(level=4).draw(10)]
    first = make_source(level=4)
    texts = [prompt.text for prompt in await first.draw(stop)]
    second = make_source(level=4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    texts += [prompt.text for prompt in await second.draw(10 - stop)]
    assert texts == unbroken


@pytest.mark.parametrize("settings", [{"level": 1}, {"seed": 2}, {"split": "eval"}])
def test_state_of_other_problems_is_refused(
    make_source: Callable[..., EnvironmentSource], settings: dict[str, Any]
) -> None:
    state = make_source().state_dict()
    (key,) = settings
    with pytest.raises(ConfigError, match=f"{key} = .*, but the run began with"):
        make_source(**settings).load_state_dict(state)


async def test_problems_over_the_limit_are_counted_and_passed_over(
    make_source: Callable[..., EnvironmentSource], parity: Any
) -> None:
    class Wordy(type(parity)):  # type: ignore[misc]
        def make(self, level: int, random: Any) -> tuple[str, dict[str, Any], str | None]:
            question, params, answer = super().make(level, random)
            return question + " Tell." * (params["number"] % 4 == 0), params, answer

    limit = len("<user>Is 999 even or odd?")
    unlimited = {prompt.prompt_id: prompt.text for prompt in await make_source(Wordy(), level=2).draw(50)}
    short = make_source(Wordy(), level=2, limit=limit)
    texts = [prompt.text for prompt in await short.draw(20)]
    assert [text for text in unlimited.values() if len(text) <= limit][:20] == texts
    assert short.num_over_length > 0
    assert short.state_dict()["failures"] == {"too_long": short.num_over_length}


def test_level_whose_problems_never_fit_is_refused_at_once(make_source: Callable[..., EnvironmentSource]) -> None:
    with pytest.raises(ConfigError, match=r"my/parity@0: 5 problems in a row cannot be used .*over rollout_max_prompt"):
        make_source(limit=3)


def test_level_that_does_not_exist_is_refused_at_once(
    make_source: Callable[..., EnvironmentSource], parity: Any
) -> None:
    parity.max_level = 3
    with pytest.raises(ConfigError, match="its levels are 0 to 3"):
        make_source(level=4)


class Exhausted:
    """Has problems until it is empty, from some level on."""

    environment_id: str = "my/exhausted"
    version: int = 1
    summary: str = "ends"
    max_level: int | None = None
    empty_from = 1_000

    def make(self, level: int, random: Any) -> tuple[str, dict[str, Any], str | None]:
        if level >= self.empty_from:
            raise RuntimeError("out of numbers")
        number = random.randrange(1000)
        return f"{number}?", {"number": number}, str(number)

    def verify(self, params: Any, response: str) -> Verdict:
        return Verdict(reward=1.0, correct=Correct.YES)


async def test_level_that_breaks_down_later_is_left_for_the_one_below(
    make_source: Callable[..., EnvironmentSource], caplog: pytest.LogCaptureFixture
) -> None:
    environment = Exhausted()
    source = make_source(environment, level=3)
    assert {prompt.metadata["level"] for prompt in await source.draw(3)} == {3}
    environment.empty_from = 2
    prompts = await source.draw(3)
    assert {(prompt.metadata["level"], prompt.source) for prompt in prompts} == {(1, "my/exhausted@3")}
    assert prompts[0].prompt_id.startswith("my/exhausted@1/train/")
    assert [record.message[:46] for record in caplog.records] == [
        f"environment my/exhausted@3: goes on at level {level}" for level in (2, 1)
    ]
    assert source.metrics() == {"environments/my/exhausted/raised": 10.0, "environments/my/exhausted/hardest": 1.0}
    resumed = make_source(environment, level=1)
    with pytest.raises(ConfigError, match="level = 1, but the run began with 3"):
        resumed.load_state_dict(source.state_dict())


async def test_environment_that_breaks_down_later_ends_the_run_with_its_cause(
    make_source: Callable[..., EnvironmentSource],
) -> None:
    environment = Exhausted()
    source = make_source(environment)
    assert len(await source.draw(3)) == 3
    environment.empty_from = 0
    last = source.state_dict()["levels"]["0"][0] + 4
    for _ in range(2):
        with pytest.raises(
            SourceFailedError, match=f"no level is left: .*problem {last}: RuntimeError: out of numbers"
        ):
            await source.draw(1)
    assert source.num_failed == 5


async def test_position_of_a_run_that_knew_one_level_is_taken(make_source: Callable[..., EnvironmentSource]) -> None:
    first, second = make_source(level=2), make_source(level=2)
    await first.draw(7)
    new = first.state_dict()
    old = {key: new[key] for key in ("environment", "version", "level", "split", "seed", "held_out_below")}
    second.load_state_dict({**old, "index": new["levels"]["2"][0], "num_over_length": 0, "num_failed": 0})
    assert [each.text for each in await second.draw(4)] == [each.text for each in await first.draw(4)]
