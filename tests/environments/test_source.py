from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rollfeed.environments import RM_TYPE, EnvironmentGrader, EnvironmentSource
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.protocols import PromptRenderer
from rollfeed.types import Correct


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
    parity.max_level = 3
    limit = len("<user>Is 12 even or odd?")
    source = make_source(level=1, limit=limit)
    unlimited = {prompt.prompt_id: prompt.text for prompt in await make_source(level=1).draw(200)}
    prompts = await source.draw(50)
    assert all(len(prompt.text) <= limit and unlimited[prompt.prompt_id] == prompt.text for prompt in prompts)
    assert source.num_over_length == 0  # every two-digit number fits
    short = make_source(level=1, limit=limit - 1)
    texts = [prompt.text for prompt in await short.draw(5)]
    assert [text for text in unlimited.values() if len(text) < limit][:5] == texts
    assert short.num_over_length > 0
    assert short.state_dict()["num_over_length"] == short.num_over_length


def test_level_whose_problems_never_fit_is_refused_at_once(make_source: Callable[..., EnvironmentSource]) -> None:
    with pytest.raises(
        ConfigError, match=r"my/parity@0: 100 problems in a row cannot be used .*over rollout_max_prompt"
    ):
        make_source(limit=3)


def test_level_that_does_not_exist_is_refused_at_once(
    make_source: Callable[..., EnvironmentSource], parity: Any
) -> None:
    parity.max_level = 3
    with pytest.raises(ConfigError, match="its levels are 0 to 3"):
        make_source(level=4)


async def test_generator_that_breaks_down_later_ends_the_run_with_its_cause(
    make_source: Callable[..., EnvironmentSource], parity: Any
) -> None:
    class Exhausted(type(parity)):  # type: ignore[misc]
        is_empty = False

        def make(self, level: int, random: Any) -> tuple[str, dict[str, Any], str | None]:
            if self.is_empty:
                raise RuntimeError("out of numbers")
            return super().make(level, random)  # type: ignore[no-any-return]

    environment = Exhausted()
    source = make_source(environment)
    assert len(await source.draw(3)) == 3
    environment.is_empty = True
    last = source.state_dict()["index"] + 99
    with pytest.raises(RunFailedError, match=f"problem {last}: RuntimeError: out of numbers"):
        await source.draw(1)
    assert source.num_failed == 100
