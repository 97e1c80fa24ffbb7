"""Environments that are named by their path, in a run: problems are made and verified in its workers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rollfeed
from rollfeed import app
from rollfeed.app import open_rollouts
from rollfeed.app.build import load_functions
from rollfeed.app.environments.task_makers import ask_source
from rollfeed.app.sources import build_source
from rollfeed.config import Settings
from rollfeed.environments.registry import named_by_path
from rollfeed.errors import ConfigError, PluginError, PromptsEndedError, RunFailedError
from rollfeed.protocols import PromptSource
from rollfeed.testing import CharTokenizer, ScriptedEngine
from rollfeed.types import Prompt, RunState, StepCommit

HERE = Path(__file__).parents[2] / "environments" / "making"
HANGS, RAISES, NOTHING, DIES, SOMETIMES, SLOW = range(1, 7)


@pytest.fixture(autouse=True)
def nothing_is_named_by_path() -> Iterator[None]:
    yield
    named_by_path.clear()
    assert not [name for name in sys.modules if name.startswith("moody")], "it was imported here"


def moody(level: int, **others: Any) -> dict[str, Any]:
    return {"id": "moody.py:Moody", "level": level, **others}


def settings_of(*environments: dict[str, Any], **prompts: Any) -> Settings:
    return Settings.model_validate(
        {
            "prompts": {"environments": environments, "make_timeout_seconds": 60.0, **prompts},
            "rollout": {"rollout_batch_size": 3, "n_samples_per_prompt": 2},
            "reward": {"workers": {"num_workers": 2, "timeout_seconds": 60.0}},
        }
    )


def open_run(settings: Settings, commits: list[StepCommit], state: RunState | None = None) -> Any:
    functions = load_functions(settings, folders=[HERE])
    workers = functions.services.workers
    source = build_source(settings, CharTokenizer(), folders=[HERE], workers=workers)
    return open_rollouts(
        settings,
        source=source,
        engine=ScriptedEngine(),
        tokenizer=CharTokenizer(),
        functions=functions,
        folders=[HERE],
        state=state,
        commit=commits.append,
    )


def prompt_ids(commits: list[StepCommit]) -> list[str]:
    return [group.prompt.prompt_id for commit in commits for group in commit.batch.groups]


async def test_problems_are_made_and_verified_in_workers_only() -> None:
    commits: list[StepCommit] = []
    async with open_run(settings_of(moody(0), {"id": "core/add_numbers"}), commits) as rollouts:
        for _ in range(3):
            await rollouts.generate_batch()
    rewards = [s.reward for commit in commits for s in commit.batch.samples if "moody" in s.metadata["environment"]]
    assert rewards
    assert set(rewards) == {0.0}


async def test_episodes_are_gone_through_in_workers() -> None:
    commits: list[StepCommit] = []
    async with open_run(settings_of({"id": "moody.py:Talk"}), commits) as rollouts:
        batch = await rollouts.generate_batch()
    assert {sample.reward for sample in batch.samples} == {0.25}
    assert {sample.metadata["num_turns"] for sample in batch.samples} == {2}


@pytest.mark.parametrize(
    ("level", "cause"),
    [
        (HANGS, "mine/talk: step: no result within 1 s"),
        (RAISES, "environment mine/talk: step raised OSError: no dice"),
        (NOTHING, "environment mine/talk: step returned None; that must be of EnvironmentStep"),
    ],
)
async def test_a_step_that_misbehaves_fails_its_rollout(level: int, cause: str) -> None:
    settings = settings_of({"id": "moody.py:Talk", "level": level})
    workers = settings.reward.workers
    if level == HANGS:
        workers = workers.model_copy(update={"timeout_seconds": 1.0})
    settings = settings.model_copy(
        update={
            "reward": settings.reward.model_copy(update={"workers": workers}),
            "rollout": settings.rollout.model_copy(update={"max_draws_per_batch": 1, "rollout_batch_size": 1}),
        }
    )
    async with open_run(settings, []) as rollouts:
        with pytest.raises(RunFailedError, match=cause):
            await rollouts.generate_batch()


async def test_a_run_that_is_killed_and_resumed_trains_on_the_same_problems() -> None:
    unbroken: list[StepCommit] = []
    broken: list[StepCommit] = []
    settings = settings_of(moody(0), moody(SLOW), {"id": "core/copy_text"})
    async with open_run(settings, unbroken) as rollouts:
        for _ in range(3):
            await rollouts.generate_batch()
    for _ in range(3):  # a manager a step, from what the last one has committed
        async with open_run(settings, broken, broken[-1].state if broken else None) as rollouts:
            await rollouts.generate_batch()
    assert prompt_ids(broken) == prompt_ids(unbroken)


async def test_a_level_whose_generator_hangs_is_left_for_the_one_below(caplog: pytest.LogCaptureFixture) -> None:
    commits: list[StepCommit] = []
    with pytest.raises(ConfigError, match=r"mine/moody@1: its first problems cannot be made in time \(no result"):
        settings_source(settings_of(moody(HANGS), make_timeout_seconds=0.5))
    settings = settings_of(moody(SOMETIMES), {"id": "core/copy_text"}, make_timeout_seconds=0.5)
    async with open_run(settings, commits) as rollouts:
        for _ in range(4):
            await rollouts.generate_batch()
    metrics = commits[-1].batch.metrics
    assert metrics["environments/mine/moody/timed_out"] >= 1
    assert commits[-1].state.source["sources"]["mine/moody@5"]["failures"]["timed_out"] >= 1


def settings_source(settings: Settings) -> PromptSource:
    return build_source(settings, CharTokenizer(), folders=[HERE])


async def drawn(source: Any, count: int) -> list[Prompt]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(source)
        prompts: list[Prompt] = await source.draw(count)
        return prompts


async def test_a_source_without_a_run_has_a_worker_of_its_own(leaves_no_process: None) -> None:
    prompts = await drawn(settings_source(settings_of(moody(0))), 20)
    assert len({prompt.text for prompt in prompts}) == 20
    again = rollfeed.environment_source("core/copy_text", level=0, seed=0, tokenizer=CharTokenizer())
    assert len(await again.draw(2)) == 2


def test_the_first_problems_are_those_of_a_time_at_most() -> None:
    (source,) = settings_source(settings_of(moody(SLOW))).sources  # type: ignore[attr-defined]
    assert 0 < len(ask_source(source, partial(source.first, 10_000, seconds=0.1))) < 1_000


async def test_the_event_loop_of_the_caller_is_no_hindrance() -> None:
    assert asyncio.get_running_loop()
    assert settings_source(settings_of(moody(0)))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (moody(7), "environment mine/moody: level = 7: its levels are 0 to 6"),
        (moody(0, parameters={"lowest": 1}), "unexpected keyword argument 'lowest'"),
        (
            moody(RAISES),
            r"mine/moody@2: 5 problems in a row cannot be used \(problem 4: OSError: no dice.*choose",
        ),
        (moody(NOTHING), "make returned None; it must return question, params and answer"),
        (moody(DIES), "exit code 7"),
        ({"id": "moody.py:Mody"}, "it has .*Moody"),
        ({"id": "mine/moodi"}, "there is none"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_starts(environment: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_source(settings_of(environment))


def test_problems_over_the_limit_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"tokens, over rollout_max_prompt_len.*choose a lower level"):
        settings_source(settings_of(moody(0), rollout_max_prompt_len=5))
    with pytest.raises(PluginError):
        settings_source(settings_of({"id": "nothing.py:Moody"}))


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_run_whose_environments_all_broke_down_trains_what_it_has_and_says_why(
    mode: str, tmp_path: Path
) -> None:
    (tmp_path / "brittle.py").write_text(BRITTLE)
    settings = settings_of({"id": "brittle.py:Brittle"})
    settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"mode": mode})})
    functions = load_functions(settings, folders=[tmp_path])
    source = build_source(settings, CharTokenizer(), folders=[tmp_path], workers=functions.services.workers)
    commits: list[StepCommit] = []
    async with open_rollouts(
        settings,
        source=source,
        engine=ScriptedEngine(),
        tokenizer=CharTokenizer(),
        functions=functions,
        commit=commits.append,
    ) as rollouts:
        with pytest.raises(RunFailedError, match=r"no prompt source is left: .*no level is left.*empty") as failed:
            await until_it_fails(rollouts)
        assert rollouts.ledger.balanced
    assert not isinstance(failed.value, PromptsEndedError)
    assert len(commits) >= 3
    assert len(set(prompt_ids(commits))) == 3 * len(commits)


async def until_it_fails(rollouts: Any) -> None:
    while True:
        await rollouts.generate_batch()


BRITTLE = """
from rollfeed.types import Correct, Verdict

class Brittle:
    environment_id, version, summary, max_level = "mine/brittle", 1, "raises more and more", 0
    num_made = 0

    def make(self, level, random):
        self.num_made += 1
        if self.num_made > 40:
            raise ValueError("empty")
        return f"{random.random()}?", {}, "1"

    def verify(self, params, response):
        return Verdict(reward=1.0, correct=Correct.YES)
"""


COUNTED = """
from pathlib import Path
with (Path(__file__).parent / "imports.txt").open("a") as file:
    file.write("once\\n")
class Counted:
    version, summary, max_level = 1, "Counts its imports.", None
    def make(self, level, random):
        return f"{random.random()}?", {}, None
    def verify(self, params, response): ...
class One(Counted):
    environment_id = "my/one"
class Two(Counted):
    environment_id = "my/two"
"""


@pytest.mark.parametrize("num_environments", [1, 2])
def test_packages_are_imported_once_however_many_environments_are_checked_at_the_start(
    tmp_path: Path, num_environments: int
) -> None:
    (tmp_path / "counted.py").write_text(COUNTED)
    chosen = [{"id": f"counted.py:{name}"} for name in ("One", "Two")][:num_environments]
    build_source(settings_of(*chosen), CharTokenizer(), folders=[tmp_path])
    assert (tmp_path / "imports.txt").read_text() == "once\n"
    evaluation = {"environments": [{**each, "num_prompts": 2} for each in chosen]}
    settings = Settings.model_validate({"eval": evaluation})
    prepared = app.prepare_evaluation(
        settings.eval, config=settings, tokenizer=CharTokenizer(), context_length=4096, folders=[tmp_path]
    )
    assert [len(each.prompts) for each in prepared.sets] == [2] * num_environments
    assert (tmp_path / "imports.txt").read_text() == "once\nonce\n"
