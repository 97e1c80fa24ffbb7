from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.base.importing import import_object
from rollfeed.environments.making import EnvironmentFacts, TaskFailedError, TaskMaker, describe_environments
from rollfeed.environments.tasks import HeldOutRule, make_task, problem_hash
from rollfeed.errors import ConfigError, PluginError
from rollfeed.protocols import Task
from rollfeed.workers import WorkerPool

MakeMaker = Callable[..., Any]
HERE = Path(__file__).parent
HANGS, RAISES, NOTHING, DIES, SOMETIMES, SLOW = range(1, 7)


def moody(**parameters: Any) -> Any:
    return import_object("moody.py:Moody", key="test", folders=[HERE])(**parameters)


async def made(maker: Any, level: int, count: int, first: int = 0) -> list[Task]:
    return [await maker.make(level=level, index=index) for index in range(first, first + count)]


@pytest.mark.parametrize("num_workers", [1, 4])
async def test_the_same_thousand_tasks_with_any_number_of_workers(moody_maker: MakeMaker, num_workers: int) -> None:
    inline = await made(TaskMaker(moody(), run_seed=5), 0, 1000)
    async with WorkerPool(num_workers=num_workers) as pool, await moody_maker(pool) as maker:
        assert await made(maker, 0, 1000) == inline
        assert pool.counts.calls < 500  # messages carry several, how many depends on the machine


async def test_problems_of_slow_generators_are_the_same_too(moody_maker: MakeMaker) -> None:
    async with WorkerPool(num_workers=2) as pool, await moody_maker(pool) as maker:
        assert await made(maker, SLOW, 12) == await made(TaskMaker(moody(), run_seed=5), SLOW, 12)


async def test_a_run_that_goes_on_in_the_middle_gets_the_same_tasks(moody_maker: MakeMaker) -> None:
    inline = await made(TaskMaker(moody(), run_seed=5), 0, 40)
    async with WorkerPool(num_workers=1) as pool:
        for stop in (1, 7, 23):
            async with await moody_maker(pool) as first:
                assert await made(first, 0, stop) == inline[:stop]
            async with await moody_maker(pool) as second:
                assert await made(second, 0, 40 - stop, first=stop) == inline[stop:]


async def test_parameters_reach_the_worker(moody_maker: MakeMaker) -> None:
    async with WorkerPool(num_workers=1) as pool, await moody_maker(pool, highest=3) as maker:
        assert await made(maker, 0, 9) == await made(TaskMaker(moody(highest=3), run_seed=5), 0, 9)


@pytest.mark.parametrize(
    ("level", "kind", "cause"),
    [
        (HANGS, "timed_out", "no result within 0.5 s"),
        (RAISES, "raised", r"OSError: no dice"),
        (NOTHING, "nothing", "make returned None; it must return question"),
        (DIES, "died", "exit code 7"),
    ],
)
async def test_failures_say_of_what_kind_they_are(moody_maker: MakeMaker, level: int, kind: str, cause: str) -> None:
    async with WorkerPool(num_workers=1) as pool:
        async with await moody_maker(pool, deadline_seconds=0.5 if level == HANGS else 60.0) as maker:
            for index in range(2):
                with pytest.raises(TaskFailedError, match=cause) as caught:
                    await maker.make(level=level, index=index)
                assert caught.value.kind == kind
        async with await moody_maker(pool) as maker:
            assert (await maker.make(level=0, index=0)).question.startswith("Say ")


def kill_who_waits_in(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)
    os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("num_before", [0, 5])
async def test_a_worker_that_others_kill_costs_no_problem(
    moody_maker: MakeMaker, tmp_path: Path, num_before: int
) -> None:
    """The first problem is alone in its message, later ones are not."""
    path = tmp_path / "pid"
    inline = await made(TaskMaker(moody(), run_seed=5), SLOW, 20)
    path.touch()
    async with WorkerPool(num_workers=1) as pool, await moody_maker(pool, waits_in=str(path)) as maker:
        tasks = await made(maker, SLOW, num_before)
        await until_idle(pool)
        path.unlink()
        async with asyncio.TaskGroup() as both:
            both.create_task(asyncio.to_thread(kill_who_waits_in, path))
            tasks += await made(maker, SLOW, 20 - num_before, first=num_before)
        assert tasks == inline
        assert pool.counts.died == 1


async def test_a_problem_that_kills_its_worker_twice_is_passed_over(moody_maker: MakeMaker) -> None:
    async with WorkerPool(num_workers=1) as pool, await moody_maker(pool) as maker:
        with pytest.raises(TaskFailedError, match="exit code 7"):
            await maker.make(level=DIES, index=0)
        assert pool.counts.died == 2


async def test_a_problem_that_hangs_takes_none_of_its_message_along(moody_maker: MakeMaker) -> None:
    async with WorkerPool(num_workers=2) as pool, await moody_maker(pool, deadline_seconds=2.0) as maker:
        hanging = {i for i in range(9) if int(make_question(i).split()[1].rstrip(".")) % 8 == 0}
        late = set()
        for index in range(9):
            try:
                task = await maker.make(level=SOMETIMES, index=index)
            except TaskFailedError:
                late.add(index)
            else:
                assert task.question == make_question(index)
    assert late == hanging == {6}  # in a message with three that come before it


def make_question(index: int) -> str:
    environment = moody()
    environment.make = lambda level, random, make=environment.make: make(0, random)
    question: str = make_task(environment, level=SOMETIMES, index=index, run_seed=5).question
    return question


async def test_the_event_loop_goes_on_while_a_generator_hangs(moody_maker: MakeMaker) -> None:
    async with WorkerPool(num_workers=2) as pool, await moody_maker(pool, deadline_seconds=3600.0) as maker:
        drawing = asyncio.create_task(maker.make(level=HANGS, index=0))
        while not pool.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await made(maker, 0, 20) == await made(TaskMaker(moody(), run_seed=5), 0, 20)
        assert not drawing.done()
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing


async def test_what_is_next_is_made_ahead(moody_maker: MakeMaker) -> None:
    async with WorkerPool(num_workers=1) as pool, await moody_maker(pool) as maker:
        await maker.make(level=0, index=0)
        for index in range(1, 40):
            await until_idle(pool)
            with pytest.raises(StopIteration):  # it does not wait
                maker.make(level=0, index=index).send(None)


async def until_idle(pool: WorkerPool) -> None:
    """Return when the worker does nothing, and who waited for it has been told."""
    num_idle = 0
    while num_idle < 5:
        await asyncio.sleep(0.001)
        num_idle = 0 if pool.num_running else num_idle + 1


async def test_a_cancelled_draw_loses_nothing(moody_maker: MakeMaker) -> None:
    async with WorkerPool(num_workers=1) as pool, await moody_maker(pool) as maker:
        drawing = asyncio.create_task(maker.make(level=SLOW, index=0))
        await asyncio.sleep(0)
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing
        assert await made(maker, SLOW, 3) == await made(TaskMaker(moody(), run_seed=5), SLOW, 3)
        assert pool.counts.died == 0


async def test_leaving_ends_what_is_under_way(moody_maker: MakeMaker) -> None:
    async with WorkerPool(num_workers=1) as pool:
        async with await moody_maker(pool, deadline_seconds=3600.0) as maker:
            maker.prefetch(level=HANGS, index=0)
            while not pool.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert pool.num_running == 0


async def test_the_rule_of_what_is_held_out_is_the_one_of_this_process(moody_maker: MakeMaker) -> None:
    async with WorkerPool(num_workers=1) as pool:
        for parameters in ({}, {"highest": 0}, {"highest": 2}):
            async with await moody_maker(pool, **parameters) as maker:
                inline = TaskMaker(moody(**parameters), run_seed=5)
                assert await maker.held_out_rule(0) == await inline.held_out_rule(0)


async def test_what_is_held_out_does_not_depend_on_the_seed_of_the_run(moody_maker: MakeMaker) -> None:
    """Of problems that are all on one side, the lowest of those that were looked at is held out."""
    environment = import_object("moody.py:OneSided", key="test", folders=[HERE])(highest=10**12)
    looked_at = [make_task(environment, level=0, index=index, run_seed=0, split="census") for index in range(200)]
    lowest = HeldOutRule(min(problem_hash(task.identity) for task in looked_at) + 1)
    assert await TaskMaker(environment, run_seed=5).held_out_rule(0) == lowest
    async with WorkerPool(num_workers=1) as pool, await moody_maker(pool, name="OneSided", highest=10**12) as maker:
        assert await maker.held_out_rule(0) == lowest


async def test_a_level_without_any_problem_in_time_has_no_rule(moody_maker: MakeMaker) -> None:
    async with WorkerPool(num_workers=1) as pool, await moody_maker(pool, deadline_seconds=0.2) as maker:
        with pytest.raises(TaskFailedError, match="no result within"):
            await maker.held_out_rule(HANGS)


async def test_a_level_that_does_not_exist_is_refused(moody_maker: MakeMaker) -> None:
    async with WorkerPool(num_workers=1) as pool, await moody_maker(pool) as maker:
        with pytest.raises(ConfigError, match="its levels are 0 to 6"):
            await maker.make(level=7, index=0)


async def test_facts_come_without_an_import_here(moody_maker: MakeMaker) -> None:
    async with WorkerPool(num_workers=1) as pool:
        (facts,) = await describe_environments([("moody.py:Moody", {})], workers=pool, folders=[HERE])
        assert facts == EnvironmentFacts.of(moody())
        with pytest.raises(PluginError, match=r"no file 'nothing.py'"):
            await describe_environments([("nothing.py:Moody", {})], workers=pool, folders=[HERE])
        with pytest.raises(PluginError, match=r"core/copy_txt.*did you mean core/copy_text"):
            await describe_environments([("core/copy_txt", {})], workers=pool)
