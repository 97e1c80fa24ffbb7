"""Problems made in workers, ahead of when they are asked for.

Invariants: what is made depends on its index only, not on what a message carried or which worker it went to; at most
one message is under way for what is next at a level; a problem that hangs costs its own deadline, and little more where
it came with others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from rollfeed.environments.making.in_workers import DESCRIBE, maker_path
from rollfeed.environments.making.maker import EnvironmentFacts, TaskFailedError, TaskFailureKind, TaskMaker
from rollfeed.environments.registry import PathEntry, named_by_path
from rollfeed.environments.tasks import CENSUS, CENSUS_SIZE, TRAIN, Census, HeldOutRule, check_level
from rollfeed.errors import PluginError, WorkerCallError, WorkerDiedError, WorkerError, WorkerTimeoutError
from rollfeed.protocols import Task, Workers

_MAX_SIZE = 16
"""Problems of a message, and so about how many are made ahead at a level."""
_MESSAGE_SECONDS = 0.05
"""After which a message begins no further problem."""
_LATE_SECONDS = 2.0
"""After which a message of several, which were quick so far, is given up and they are asked for one by one."""
_IMPORT_SECONDS = 60.0
"""To import the packages of environments."""

_Made: TypeAlias = Task | TaskFailedError


async def describe_environments(
    chosen: Sequence[tuple[str, Mapping[str, Any]]], *, workers: Workers, folders: Sequence[Path] = ()
) -> list[EnvironmentFacts]:
    """Return the facts of environments by id or import path, with parameters; they are imported in a worker only.

    Raises:
        PluginError: If one is not there, cannot be imported or does not take its parameters.
    """
    arguments = [[list(each) for each in chosen], [str(folder.resolve()) for folder in folders]]
    try:
        found = await workers.call(DESCRIBE, arguments, deadline_seconds=_IMPORT_SECONDS)
    except WorkerCallError as error:
        raise PluginError(str(error)) from error
    except WorkerError as error:
        raise PluginError(f"importing {', '.join(name for name, _ in chosen):.300}: {error}") from error
    for each in found:
        if each["entry"] is not None:
            entry = PathEntry(*each["entry"])
            named_by_path[entry.name] = entry._replace(folders=tuple(entry.folders))
    return [EnvironmentFacts(**each["facts"]) for each in found]


@dataclass(slots=True)
class _Stream:
    """The problems of a level that are made, or under way."""

    asked: Mapping[str, Any]
    """Level, run seed and split."""
    ready: dict[int, _Made] = field(default_factory=dict)
    pending: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """The message by the indices that it may bring."""
    size: int = 1
    """Problems of the next message: doubled while they are quick, 1 for a while after one that hangs."""
    num_alone: int = 0
    """Problems that are still to be asked for one by one."""

    def next_missing(self, index: int) -> int:
        while index in self.ready:
            index += 1
        return index


class PooledTaskMaker(TaskMaker):
    """Makes the problems of one environment in workers; leave it as a context manager, and nothing is under way.

    ``turns`` bounds the messages that are under way at once, so that workers are left for others; ``deadline_seconds``
    is for a problem, from the turn of its message.
    """

    def __init__(
        self,
        facts: EnvironmentFacts,
        *,
        run_seed: int,
        parameters: Mapping[str, Any] | None = None,
        workers: Workers,
        turns: asyncio.Semaphore,
        deadline_seconds: float,
    ) -> None:
        self.facts = facts
        self._run_seed = run_seed
        self._parameters = json.dumps(dict(parameters or {}), sort_keys=True)
        self._workers = workers
        self._turns = turns
        self._deadline_seconds = deadline_seconds
        self._streams: dict[tuple[str, int], _Stream] = {}

    async def __aenter__(self) -> PooledTaskMaker:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As :meth:`TaskMaker.close`."""
        messages = {message for stream in self._streams.values() for message in stream.pending.values()}
        for message in messages:
            message.cancel()
        await asyncio.gather(*messages, return_exceptions=True)
        self._streams.clear()

    @asynccontextmanager
    async def using(self, workers: Workers) -> AsyncIterator[None]:
        """Have other workers make the problems of a block, perhaps in another event loop than the run's."""
        before = self._workers, self._turns
        self._workers, self._turns = workers, asyncio.Semaphore(1)
        try:
            yield
        finally:
            await self.close()
            self._workers, self._turns = before

    async def make(self, *, level: int, index: int, split: str = TRAIN) -> Task:
        """As :meth:`TaskMaker.make`; cancelled, it leaves what is under way to whoever asks next."""
        check_level(self.facts, level)
        stream = self._stream(level, split)
        made = await self._made(stream, index)
        for passed in [known for known in stream.ready if known < index]:
            del stream.ready[passed]
        self._ask_ahead(stream, index + 1)
        if isinstance(made, TaskFailedError):
            raise TaskFailedError(made.kind, made.cause)
        return made

    def prefetch(self, *, level: int, index: int, split: str = TRAIN) -> None:
        """As :meth:`TaskMaker.prefetch`: one message, unless there is one under way."""
        self._ask_ahead(self._stream(level, split), index)

    async def held_out_rule(self, level: int) -> HeldOutRule | None:
        """As :meth:`TaskMaker.held_out_rule`."""
        if self.facts.has_splits:
            return None
        census, stream, num_late = Census(), self._stream(level, CENSUS, run_seed=0), 0
        for index in range(CENSUS_SIZE):
            made = await self._made(stream, index)
            if isinstance(made, TaskFailedError):
                num_late += made.kind.costs_a_worker
                if num_late == 3:
                    raise TaskFailedError(made.kind, made.cause)
            elif census.count(made):
                break
        del self._streams[CENSUS, level]
        return census.rule

    def _stream(self, level: int, split: str, *, run_seed: int | None = None) -> _Stream:
        asked = {"level": level, "split": split, "run_seed": self._run_seed if run_seed is None else run_seed}
        return self._streams.setdefault((split, level), _Stream(asked))

    async def _made(self, stream: _Stream, index: int) -> _Made:
        while index not in stream.ready:
            message = stream.pending.get(index) or self._ask(stream, index)
            await asyncio.wait([message])
            await message  # raises what is no problem's fault
        return stream.ready[index]

    def _ask_ahead(self, stream: _Stream, index: int) -> None:
        first = stream.next_missing(index)
        if not stream.pending and first - index < stream.size:
            self._ask(stream, first)

    def _ask(self, stream: _Stream, first: int) -> asyncio.Task[None]:
        indices = range(first, first + stream.size)
        message = asyncio.create_task(self._bring(stream, indices))
        for index in indices:
            stream.pending[index] = message

        def end(message: asyncio.Task[None]) -> None:
            for index in indices:
                if stream.pending.get(index) is message:
                    del stream.pending[index]
            if not message.cancelled():
                message.exception()  # whoever asks again is told

        message.add_done_callback(end)
        return message

    async def _bring(self, stream: _Stream, indices: Sequence[int]) -> None:
        """Have problems made; of several, some may be missing."""
        try:
            async with self._turns:
                found = await self._call(stream, indices)
        except WorkerError as error:
            stream.size, stream.num_alone = 1, _MAX_SIZE
            if len(indices) == 1:
                stream.ready[indices[0]] = worker_failure(error)
            return
        if stream.num_alone:
            stream.num_alone -= 1
        else:
            stream.size = min(2 * len(indices), _MAX_SIZE) if len(found) == len(indices) else len(found)
        for index, each in zip(indices, found, strict=False):
            stream.ready[index] = _read(each)

    async def _call(self, stream: _Stream, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return what a worker makes; one that dies may have been killed by others, so the next one tries once more."""
        arguments = [self._parameters, stream.asked, list(indices), _MESSAGE_SECONDS]
        deadline = self._deadline_seconds if len(indices) == 1 else min(self._deadline_seconds, _LATE_SECONDS)
        call = partial(self._workers.call, maker_path(self.facts.environment_id), arguments, deadline_seconds=deadline)
        try:
            made: list[dict[str, Any]] = await call()
        except WorkerDiedError:
            if len(indices) > 1:  # these are asked for one by one
                raise
            made = await call()
        return made


def _read(found: Mapping[str, Any]) -> _Made:
    if "task" in found:
        return msgspec.convert(found["task"], type=Task)
    return TaskFailedError(TaskFailureKind(found["kind"]), found["cause"])


def worker_failure(error: WorkerError) -> TaskFailedError:
    """Return what an error of a worker says of the problem that it was to make."""
    kinds = {
        WorkerTimeoutError: TaskFailureKind.TIMED_OUT,
        WorkerDiedError: TaskFailureKind.DIED,
        WorkerCallError: TaskFailureKind.RAISED,
    }
    return TaskFailedError(kinds[type(error)], str(error))
