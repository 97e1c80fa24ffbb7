"""Makers of problems from settings: built-in environments in this process, all others in the run's workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rollfeed.base.loop_thread import LoopThread
from rollfeed.base.waiting import without_waiting
from rollfeed.config.prompts import PromptSettings
from rollfeed.environments import EnvironmentRegistry, EnvironmentSource, with_parameters
from rollfeed.environments.making import (
    EnvironmentFacts,
    PooledTaskMaker,
    TaskMaker,
    describe_environments,
)
from rollfeed.errors import ConfigError, PluginError
from rollfeed.protocols import Task, Workers
from rollfeed.workers import WorkerPool

_T = TypeVar("_T")

_worker: ContextVar[Callable[[Callable[[Workers], Coroutine[Any, Any, Any]]], Any] | None]
_worker = ContextVar("worker", default=None)
"""Does what needs workers, in a block of :func:`one_worker`."""


class ChosenEnvironment(NamedTuple):
    """An environment as settings choose it."""

    environment_id: str
    """Or its import path."""
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MakingPlan:
    """Workers for problems of environments that are not built in, and their deadline."""

    workers: WorkerPool
    timeout_seconds: float
    folders: Sequence[Path] = ()
    """Searched for environments that are named by paths."""

    @classmethod
    def alone(cls, *, folders: Sequence[Path] = ()) -> MakingPlan:
        """Return a plan without a run: its worker starts where it is needed."""
        seconds = PromptSettings().make_timeout_seconds
        return cls(workers=WorkerPool(num_workers=1), timeout_seconds=seconds, folders=folders)

    def make(self, chosen: Sequence[ChosenEnvironment], *, seed: int) -> list[TaskMaker]:
        """Return what makes the problems of each; environments that are not built in are imported in a worker only.

        Raises:
            ConfigError: If there is no such environment or parameter; or PluginError.
        """
        registry, makers = EnvironmentRegistry(folders=self.folders), dict[int, TaskMaker]()
        for place, each in enumerate(chosen):
            if registry.is_own(each.environment_id):
                environment = with_parameters(registry.get(each.environment_id), each.parameters)
                makers[place] = TaskMaker(environment, run_seed=seed)
            elif ":" not in each.environment_id and each.environment_id not in registry:
                registry.get(each.environment_id)  # raises
        others = [place for place in range(len(chosen)) if place not in makers]
        if not others:
            return list(makers.values())
        asked = [chosen[place] for place in others]
        facts = with_workers(lambda workers: describe_environments(asked, workers=workers, folders=self.folders))
        turns = asyncio.Semaphore(max(1, self.workers.num_workers // 2))
        for place, known in zip(others, facts, strict=True):
            makers[place] = PooledTaskMaker(
                known,
                run_seed=seed,
                parameters=chosen[place].parameters,
                workers=self.workers,
                turns=turns,
                deadline_seconds=self.timeout_seconds,
            )
        return [makers[place] for place in range(len(chosen))]


@contextmanager
def one_worker() -> Iterator[None]:
    """Have all that :func:`with_workers` does in a block done by one worker, which imports each package once."""
    if _worker.get() is not None:
        yield
        return
    pool, thread = WorkerPool(num_workers=1), LoopThread("one-worker")  # another loop may stand still in this thread
    token = _worker.set(lambda work: thread.call(work(pool)))
    try:
        yield
    finally:
        _worker.reset(token)
        try:
            thread.call(pool.__aexit__())
        finally:
            thread.close()


def with_workers(work: Callable[[Workers], Coroutine[Any, Any, _T]]) -> _T:
    """Do what needs workers before a run has any, with one that ends with it; the calling thread waits."""
    with one_worker():
        do = _worker.get()
        assert do is not None
        result: _T = do(work)
        return result


def listed_environments() -> dict[str, EnvironmentFacts | ConfigError | str]:
    """Return the facts of all installed environments by id; of one that its package does not give, the error.

    Of those that adapters have, which take seconds to import, it is their summaries.
    """
    registry = EnvironmentRegistry()
    own = {each: EnvironmentFacts.of(registry.get(each)) for each in registry.ids() if registry.is_own(each)}
    found: dict[str, EnvironmentFacts | ConfigError | str] = {**registry.adapted(), **own}

    async def describe_others(workers: Workers) -> None:
        for each in registry.ids():
            if each not in found:
                try:
                    (found[each],) = await describe_environments([(each, {})], workers=workers)
                except PluginError as error:
                    found[each] = error

    if len(found) < len(registry.ids()):
        with_workers(describe_others)
    return dict(sorted(found.items()))


def sample_tasks(
    chosen: ChosenEnvironment, plan: MakingPlan, *, level: int, indices: Sequence[int], seed: int
) -> list[Task]:
    """Return problems of an environment. Raises TaskFailedError if one cannot be made; the calling thread waits."""
    (maker,) = plan.make([chosen], seed=seed)

    async def make() -> list[Task]:
        return [await maker.make(level=level, index=index) for index in indices]

    return ask_maker(maker, make)


def ask_source(source: EnvironmentSource, work: Callable[[], Awaitable[_T]]) -> _T:
    """Return what a method of a source returns, before a run has any workers; the calling thread waits."""
    return ask_maker(source.maker, work)


def ask_maker(maker: TaskMaker, work: Callable[[], Awaitable[_T]]) -> _T:
    """Return what work returns that needs a maker, before a run has any workers; the calling thread waits."""

    async def do() -> _T:
        return await work()

    async def do_with(workers: Workers) -> _T:
        assert isinstance(maker, PooledTaskMaker)
        async with maker.using(workers):
            return await work()

    return with_workers(do_with) if isinstance(maker, PooledTaskMaker) else without_waiting(do())
