from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest

from rollfeed.base.waiting import without_waiting
from rollfeed.environments import EnvironmentSource, make_task, with_parameters
from rollfeed.environments.builtin import BUILTIN_ENVIRONMENTS, AddNumbers, ReverseText
from rollfeed.environments.tasks import HELD_OUT_SHARE, held_out_rule, problem_hash
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.protocols import MULTI_TURN, PromptRenderer
from rollfeed.types import Correct, Verdict


def test_task_can_be_made_again_from_its_place(parity: Any) -> None:
    assert make_task(parity, level=2, index=5, run_seed=1) == make_task(parity, level=2, index=5, run_seed=1)


def test_every_part_of_the_place_changes_the_seed(parity: Any) -> None:
    places = [
        {"level": 0, "index": 0, "run_seed": 0, "split": "train"},
        {"level": 1, "index": 0, "run_seed": 0, "split": "train"},
        {"level": 0, "index": 1, "run_seed": 0, "split": "train"},
        {"level": 0, "index": 0, "run_seed": 1, "split": "train"},
        {"level": 0, "index": 0, "run_seed": 0, "split": "eval"},
    ]
    seeds = {make_task(parity, **place).seed for place in places}  # type: ignore[arg-type]
    parity.version += 1
    seeds.add(make_task(parity, level=0, index=0, run_seed=0).seed)
    parity.environment_id = "my/other"
    seeds.add(make_task(parity, level=0, index=0, run_seed=0).seed)
    assert len(seeds) == 7


def test_halves_of_surrogate_pairs_in_a_problem_become_replacement_characters(
    parity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "make", lambda level, random: ("cut \ud83d", {"a": ["\ud83d"]}, "\udc00"))
    task = make_task(parity, level=0, index=0, run_seed=0)
    assert (task.question, task.params, task.answer) == ("cut \ufffd", {"a": ["\ufffd"]}, "\ufffd")


@pytest.mark.parametrize("level", [-1, 41])
def test_level_that_does_not_exist_is_refused(level: int) -> None:
    add_numbers = next(env for env in BUILTIN_ENVIRONMENTS if env.environment_id == "core/add_numbers")
    with pytest.raises(ConfigError, match=f"core/add_numbers: level = {level}: its levels are 0 to 40"):
        make_task(add_numbers, level=level, index=0, run_seed=0)


def test_params_that_json_cannot_hold_are_refused(parity: Any) -> None:
    class Careless(type(parity)):  # type: ignore[misc]
        def make(self, level: int, random: Any) -> tuple[str, dict[str, Any], str | None]:
            return "?", {"numbers": {1, 2}}, None

    with pytest.raises(TypeError, match="set is not JSON serializable"):
        make_task(Careless(), level=0, index=0, run_seed=0)


def test_tasks_are_the_same_in_processes_with_other_hash_seeds() -> None:
    program = """
import json
from rollfeed.environments import make_task
from rollfeed.environments.builtin import BUILTIN_ENVIRONMENTS
tasks = [make_task(e, level=l, index=i, run_seed=7) for e in BUILTIN_ENVIRONMENTS for l in (0, 9) for i in range(5)]
print(json.dumps([(task.seed, task.question, dict(task.params), task.answer) for task in tasks]))
"""
    here = [
        [task.seed, task.question, dict(task.params), task.answer]
        for environment in BUILTIN_ENVIRONMENTS
        for level in (0, 9)
        for task in (make_task(environment, level=level, index=index, run_seed=7) for index in range(5))
    ]
    for hash_seed in ("1", "2"):
        environ = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)}
        out = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
        assert json.loads(out.stdout) == here


def test_an_environment_without_parameters_takes_none() -> None:
    environment = AddNumbers()
    assert with_parameters(environment, {}) is environment
    with pytest.raises(ConfigError, match="core/add_numbers: has no parameters, so digits, terms cannot be set"):
        with_parameters(environment, {"terms": 2, "digits": 3})


def test_parameters_hold_in_every_split() -> None:
    environment = with_parameters(ReverseText(), {"style": "compact", "alphabet_size": 3})
    for split in ("train", "eval"):
        task = make_task(environment, level=6, index=0, run_seed=0, split=split)
        assert task.question.startswith("rev:")
        assert set(task.params["text"]) <= set("abc")


def test_an_environment_without_splits_has_other_seeds_for_each() -> None:
    seeds = {make_task(AddNumbers(), level=0, index=0, run_seed=0, split=split).seed for split in ("train", "eval")}
    assert len(seeds) == 2


async def test_source_of_a_split_draws_from_its_words_only(make_renderer: Callable[..., PromptRenderer]) -> None:
    environment = ReverseText(style="compact")
    words: dict[str, set[Any]] = {}
    for split in ("train", "eval"):
        source = EnvironmentSource(
            environment, level=1, seed=5, renderer=make_renderer(), split=split, apply_chat_template=False
        )
        prompts = await source.draw(100)
        assert all(prompt.text.startswith("rev:") for prompt in prompts)
        words[split] = {prompt.metadata["params"]["text"] for prompt in prompts}
    assert not words["train"] & words["eval"]


def test_take_returns_what_draw_does(make_renderer: Callable[..., PromptRenderer]) -> None:
    first, second = (EnvironmentSource(AddNumbers(), level=2, seed=5, renderer=make_renderer()) for _ in range(2))
    taken = without_waiting(first.draw(3)) + without_waiting(first.draw(2))
    assert [prompt.prompt_id for prompt in taken] == [prompt.prompt_id for prompt in without_waiting(second.draw(5))]


MakeSource = Callable[..., EnvironmentSource]


class Few:
    """An environment that has so many problems at every level, and asks them in no order."""

    environment_id: str = "my/few"
    version: int = 1
    summary: str = "few problems"
    max_level: int | None = 0

    def __init__(self, num_problems: int, salt: str = "") -> None:
        self._num_problems = num_problems
        self._salt = salt

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        number = random.randrange(self._num_problems)
        return f"{self._salt}{number}?", {"number": number}, str(number)

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        right = response == str(params["number"])
        return Verdict(reward=float(right), correct=Correct.YES if right else Correct.NO)


@pytest.fixture
def make_source(make_renderer: Callable[..., PromptRenderer]) -> MakeSource:
    def make(environment: Any, **settings: Any) -> EnvironmentSource:
        return EnvironmentSource(environment, renderer=make_renderer(), **{"level": 0, "seed": 0} | settings)

    return make


def asked(prompts: list[Any]) -> set[str]:
    return {
        prompt.text + (str(prompt.metadata["params"]) if MULTI_TURN in prompt.metadata else "") for prompt in prompts
    }


HOLDING_OUT = [each for each in BUILTIN_ENVIRONMENTS if each.environment_id != "core/guess_number"]
"""All but the one whose problems ask the same."""


@pytest.mark.parametrize("environment", HOLDING_OUT, ids=lambda each: each.environment_id)
@pytest.mark.parametrize("level", [0, 1, 2])
def test_no_held_out_problem_is_one_of_training(make_source: MakeSource, environment: Any, level: int) -> None:
    held_out = asked(without_waiting(make_source(environment, level=level, split="eval").draw_different(100)))
    trained = asked(without_waiting(make_source(environment, level=level, seed=7).draw(1000)))
    assert held_out
    assert not held_out & trained


def test_the_side_of_a_problem_is_the_same_in_every_run_and_split(make_source: MakeSource) -> None:
    for seed in range(2):
        probed = asked(without_waiting(make_source(Few(50), split="probe", seed=seed).draw_different(100)))
        evaluated = asked(without_waiting(make_source(Few(50), split="eval", seed=seed + 10).draw_different(100)))
        assert probed == evaluated
        assert asked(without_waiting(make_source(Few(50), seed=seed).draw_different(100))) | probed == {
            f"<user>{number}?" for number in range(50)
        }


def test_about_a_fifth_of_all_problems_is_held_out() -> None:
    rule = held_out_rule(Few(10_000), 0)
    assert rule is not None
    held_out = sum(rule.is_of(f"{number}?", "eval") for number in range(10_000))
    assert held_out / 10_000 == pytest.approx(HELD_OUT_SHARE, abs=0.02)


@pytest.mark.parametrize("num_problems", [2, 3, 5, 16])
def test_a_small_level_has_problems_on_both_sides(num_problems: int) -> None:
    for salt in map(str, range(40)):
        rule = held_out_rule(Few(num_problems, salt), 0)
        assert rule is not None
        held_out = [rule.is_of(f"{salt}{number}?", "eval") for number in range(num_problems)]
        assert 0 < sum(held_out) < num_problems


def test_a_level_of_two_problems_trains_on_one_and_is_measured_on_the_other(make_source: MakeSource) -> None:
    trained = asked(without_waiting(make_source(Few(2)).draw(50)))
    held_out = asked(without_waiting(make_source(Few(2), split="eval", seed=3).draw_different(100)))
    assert (len(trained), len(held_out), len(trained | held_out)) == (1, 1, 2)


def test_the_only_problem_of_a_level_is_trained_on_and_cannot_be_measured_on(make_source: MakeSource) -> None:
    for salt in "abc":
        environment = Few(1, salt)
        assert len(without_waiting(make_source(environment).draw(3))) == 3
        with pytest.raises(ConfigError, match=r"my/few@0: of 1,000 problems .* none is of the split 'eval'.*split = "):
            make_source(environment, split="eval")


def test_a_set_of_different_problems_is_as_large_as_the_level(make_source: MakeSource) -> None:
    all_of_them = without_waiting(make_source(Few(81), split="eval").draw_different(1000))
    assert len(all_of_them) == len(asked(all_of_them))
    rule = held_out_rule(Few(81), 0)
    assert rule is not None
    assert len(all_of_them) == sum(rule.is_of(f"{number}?", "eval") for number in range(81))
    assert len(without_waiting(make_source(Few(81), split="eval").draw_different(5))) == 5


def test_an_index_gives_the_same_problem_whatever_was_drawn_before(make_source: MakeSource) -> None:
    prompts = without_waiting(make_source(Few(10)).draw(30))
    for prompt in prompts:
        index = int(prompt.prompt_id.rsplit("/", 1)[1])
        assert prompt.text == f"<user>{make_task(Few(10), level=0, index=index, run_seed=0).question}"
    indices = [int(prompt.prompt_id.rsplit("/", 1)[1]) for prompt in prompts]
    assert indices == sorted(indices)
    assert indices != list(range(30))
    for stop in (1, 7, 20):
        first, second = make_source(Few(10)), make_source(Few(10))
        without_waiting(first.draw(stop))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [each.prompt_id for each in without_waiting(second.draw(30 - stop))] == [
            each.prompt_id for each in prompts[stop:]
        ]


def test_first_prompts_are_those_of_a_new_source_and_the_source_stays_where_it_is(make_source: MakeSource) -> None:
    source = make_source(Few(10))
    unbroken = [prompt.prompt_id for prompt in without_waiting(make_source(Few(10)).draw(6))]
    without_waiting(source.draw(3))
    assert [prompt.prompt_id for prompt in without_waiting(source.first(6))] == unbroken
    assert [prompt.prompt_id for prompt in without_waiting(source.draw(3))] == unbroken[3:]


def test_a_run_that_held_seeds_out_is_not_gone_on_with(make_source: MakeSource) -> None:
    state = make_source(Few(10)).state_dict()
    del state["held_out_below"]
    with pytest.raises(ConfigError, match=r"my/few@0: the run is of a version that held out seeds .*start a new run"):
        make_source(Few(10)).load_state_dict(state)


def test_a_run_of_an_environment_with_splits_of_its_own_goes_on(make_source: MakeSource) -> None:
    reverse = next(each for each in BUILTIN_ENVIRONMENTS if each.environment_id == "core/reverse_text")
    state = make_source(reverse).state_dict()
    del state["held_out_below"]
    make_source(reverse).load_state_dict(state)


def test_training_on_a_level_that_gives_only_held_out_problems_after_all_ends_with_its_name(
    make_source: MakeSource,
) -> None:
    environment = Few(1000)
    source = make_source(environment)
    rule = held_out_rule(environment, 0)
    assert rule is not None
    only = next(number for number in range(1000) if rule.is_of(f"{number}?", "eval"))
    environment.make = lambda level, random: (f"{only}?", {}, "")  # type: ignore[method-assign]
    with pytest.raises(RunFailedError, match=r"my/few: no level .* of 1,000 problems in a row none is of"):
        without_waiting(source.draw(1))


def test_sides_are_the_same_in_every_process() -> None:
    code = (
        "from rollfeed.environments.tasks import *\n"
        "from rollfeed.environments.builtin import AddNumbers\n"
        "print(problem_hash('3 + 4?'), held_out_rule(AddNumbers(), 0))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1
    assert str(problem_hash("3 + 4?")) in told.pop()
