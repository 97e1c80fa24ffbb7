"""A pool of killable processes that call plain functions by name.

Invariants: every call ends once, with its function's result or a :class:`WorkerError`, within its
deadline once it has its turn, whatever the function does; a hanging call costs one worker for its own deadline;
calls get their turns in the order in which they came; leaving the pool leaves no process.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollfeed.errors import ConfigError, WorkerCallError, WorkerDiedError, WorkerError, WorkerTimeoutError
from rollfeed.protocols import Workers
from rollfeed.workers.process import WorkerProcess


@dataclass(slots=True)
class PoolCounts:
    """Counts of calls since the pool was opened."""

    calls: int = 0
    cached: int = 0
    """Answered without a worker."""
    timeouts: int = 0
    died: int = 0
    """Ended because the process died, or none could be started."""
    raised: int = 0
    recycled: int = 0
    """Healthy workers that were replaced because of their age or their memory."""


class WorkerPool:
    """Calls functions in processes of its own, which start with the first call and end with the ``async with`` block.

    Workers are fresh interpreters: they share the parent's module search path, never its ``__main__``, its memory
    or its open files.

    Args:
        num_workers: Processes, and so calls at once.
        warm_up: Modules that every worker imports when it starts, so that no call waits for them.
        memory_limit_bytes: Address space of each worker, None for any; more is a MemoryError in the function.
        recycle_bytes: A worker whose resident memory is above this after a call is replaced.
        recycle_calls: A worker is replaced after this many calls.
        max_waiting: Calls that wait for a turn with their arguments encoded; further ones wait before that.
        cache_entries: Results kept for calls that are ``cached``.
        cache_bytes: Size of all of these together.
        start_timeout_seconds: For the start of a worker with its warm-up, and for importing a function's module.
        hash_seed: Of hashes of text in all workers, so that the order of sets is the same in each.
        threads: Threads that a function may compute in.
        sees_devices: Whether functions may use accelerators.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        warm_up: Sequence[str] = (),
        memory_limit_bytes: int | None = 4 * 1024**3,
        recycle_bytes: int = 1024**3,
        recycle_calls: int = 10_000,
        max_waiting: int = 1_024,
        cache_entries: int = 10_000,
        cache_bytes: int = 32 * 1024**2,
        start_timeout_seconds: float = 60.0,
        hash_seed: int = 0,
        threads: int = 1,
        sees_devices: bool = False,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"num_workers = {num_workers}: a pool needs at least one worker")
        self.counts = PoolCounts()
        self.output: Path | None = None
        """The file that gets the lines that functions print, of workers that start later; by default they are lost."""
        self.elsewhere: Workers | None = None
        """What makes all calls in place of processes of this pool, where there is such a thing."""
        self._warm_up = tuple(warm_up)
        self._memory_limit_bytes = memory_limit_bytes
        self._recycle_bytes = recycle_bytes
        self._recycle_calls = recycle_calls
        self._start_timeout_seconds = start_timeout_seconds
        self._hash_seed = hash_seed
        self._computing: dict[str, Any] = {"threads": threads, "sees_devices": sees_devices}
        self._cache = ResultCache(max_entries=cache_entries, max_bytes=cache_bytes)
        self._entrance = asyncio.Semaphore(num_workers + max_waiting)
        self._turns = asyncio.Semaphore(num_workers)
        self._idle = [_Slot() for _ in range(num_workers)]
        self._slots = tuple(self._idle)
        self._starting = asyncio.Lock()
        self._open = False
        self._closed = False

    @property
    def num_workers(self) -> int:
        """Number of processes, and so of calls at once."""
        return len(self._slots)

    @property
    def num_running(self) -> int:
        """Calls that have their turn now."""
        return len(self._slots) - len(self._idle)

    async def __aenter__(self) -> WorkerPool:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        self._closed = True
        async with self._starting:
            await self._end()

    async def start(self) -> None:
        """Start the processes now, unless they run.

        Raises:
            ConfigError: If one cannot be started, or a warm-up module cannot be imported; the next call tries again.
            WorkerDiedError: If the block has been left.
        """
        async with self._starting:
            if self._closed:
                raise WorkerDiedError("the worker pool is closed")
            if self._open:
                return
            try:
                for slot in self._slots:
                    self._replace(slot)
                for slot in self._slots:
                    await slot.ready()
                self._open = True
            except WorkerError as error:
                await self._end()
                raise ConfigError(f"the worker pool cannot start: {error}") from error
            except BaseException:
                await self._end()
                raise

    async def _end(self) -> None:
        """Kill all workers and wait for their ends; calls that run get a WorkerDiedError."""
        self._open = False
        await asyncio.gather(*(slot.close() for slot in self._slots))

    async def call(
        self, function_path: str, args: Sequence[Any], *, deadline_seconds: float, cached: bool = False
    ) -> Any:
        """Call a plain function in a worker and return its result as JSON values.

        It is named as ``package.module.function`` or ``module:name``, never of ``__main__``; tuples arrive as lists.
        The deadline counts from the call's turn, and there the process is killed; that of a cancelled call, too, unless
        it had no turn yet. ``cached`` takes the result of an equal call, and keeps this one's.

        Raises:
            ConfigError: If the processes cannot be started.
            WorkerTimeoutError: If it is not done in time.
            WorkerDiedError: If its process dies, cannot be started, or the pool is closed.
            WorkerCallError: If it raises, cannot be found, or takes or returns what is not JSON.
        """
        if self.elsewhere is not None:
            return await self.elsewhere.call(function_path, args, deadline_seconds=deadline_seconds, cached=cached)
        if not self._open or self._closed:
            await self.start()
        self.counts.calls += 1
        try:
            async with self._entrance:
                text = await self._call(function_path, _encode(args), deadline_seconds=deadline_seconds, cached=cached)
        except WorkerTimeoutError:
            self.counts.timeouts += 1
            raise
        except WorkerDiedError:
            self.counts.died += 1
            raise
        except WorkerCallError:
            self.counts.raised += 1
            raise
        return json.loads(text)

    async def _call(self, function_path: str, args_json: str, *, deadline_seconds: float, cached: bool) -> str:
        key = ResultCache.key(function_path, args_json) if cached else None
        if (known := self._known(key)) is not None:
            return known
        async with self._turns:
            # The same question may have been answered while this one waited.
            if (known := self._known(key)) is not None:
                return known
            text = await self._call_now(function_path, args_json, deadline_seconds)
        if key is not None:
            self._cache.put(key, text)
        return text

    def _known(self, key: bytes | None) -> str | None:
        known = None if key is None else self._cache.get(key)
        if known is not None:
            self.counts.cached += 1
        return known

    async def _call_now(self, function_path: str, args_json: str, deadline_seconds: float) -> str:
        slot = next((slot for slot in self._idle if slot.is_ready), self._idle[0])
        self._idle.remove(slot)
        try:
            if not self._open:
                raise WorkerDiedError("the worker pool is closed")
            if slot.needs_worker:
                self._replace(slot)
            try:
                worker = await slot.ready()
            except WorkerCallError as error:
                raise WorkerDiedError(f"a worker process cannot be started: {error}") from error
            try:
                return await worker.call(
                    function_path,
                    args_json,
                    deadline_seconds=deadline_seconds,
                    load_seconds=self._start_timeout_seconds,
                )
            finally:
                if self._is_due(worker):
                    self._replace(slot)
        finally:
            self._idle.append(slot)

    def _is_due(self, worker: WorkerProcess) -> bool:
        if not self._open or worker.spent:
            return self._open
        old = worker.num_calls >= self._recycle_calls or worker.resident_bytes > self._recycle_bytes
        self.counts.recycled += old
        return old

    def _replace(self, slot: _Slot) -> None:
        slot.restart(
            memory_limit_bytes=self._memory_limit_bytes,
            warm_up=self._warm_up,
            start_timeout_seconds=self._start_timeout_seconds,
            hash_seed=self._hash_seed,
            output=self.output,
            **self._computing,
        )


class _Slot:
    """The place of one worker: it has a worker, or one is being started."""

    def __init__(self) -> None:
        self._starting: asyncio.Task[WorkerProcess] | None = None
        self._worker: WorkerProcess | None = None

    @property
    def is_ready(self) -> bool:
        return self._worker is not None and not self._worker.spent

    @property
    def needs_worker(self) -> bool:
        failed = self._starting is not None and self._starting.done() and not self.is_ready
        return self._starting is None or failed

    def restart(
        self,
        *,
        memory_limit_bytes: int | None,
        warm_up: Sequence[str],
        start_timeout_seconds: float,
        hash_seed: int,
        output: Path | None,
        **computing: Any,
    ) -> None:
        """End the present worker and start another, in the background."""
        old, self._worker = self._worker, None

        async def start() -> WorkerProcess:
            if old is not None:
                await old.kill()
            self._worker = await WorkerProcess.start(
                memory_limit_bytes=memory_limit_bytes,
                warm_up=warm_up,
                start_timeout_seconds=start_timeout_seconds,
                hash_seed=hash_seed,
                output=output,
                **computing,
            )
            return self._worker

        self._starting = asyncio.create_task(start())
        self._starting.add_done_callback(_mark_seen)

    async def ready(self) -> WorkerProcess:
        """Return the worker once it is ready for calls."""
        starting = self._starting
        assert starting is not None
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError as error:
            if starting.cancelled():
                raise WorkerDiedError("the worker pool was closed") from error
            raise

    async def close(self) -> None:
        """Kill the worker, also one that is being started."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._worker is not None:
            await self._worker.kill()


class ResultCache:
    """The most recently used results by question, bounded in number and in bytes."""

    def __init__(self, *, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._results: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    @staticmethod
    def key(function_path: str, args_json: str) -> bytes:
        """Return what stands for a question, of one size whatever its length."""
        return hashlib.blake2b(f"{function_path}\n{args_json}".encode(), digest_size=20).digest()

    def get(self, key: bytes) -> str | None:
        """Return the result, or None where there is none."""
        if key not in self._results:
            return None
        self._results.move_to_end(key)
        return self._results[key]

    def put(self, key: bytes, result: str) -> None:
        """Keep a result; the longest unused ones make room for it."""
        self._num_bytes += len(result) - len(self._results.pop(key, ""))
        self._results[key] = result
        while self._results and (len(self._results) > self._max_entries or self._num_bytes > self._max_bytes):
            _, dropped = self._results.popitem(last=False)
            self._num_bytes -= len(dropped)


def _encode(args: Sequence[Any]) -> str:
    try:
        return json.dumps(list(args))
    except (TypeError, ValueError, RecursionError) as error:
        raise WorkerCallError(f"the arguments are not JSON: {error}") from error


def _mark_seen(task: asyncio.Task[WorkerProcess]) -> None:
    """Keep asyncio from reporting a failed start that nobody waits for; the next call tries again and is told."""
    if not task.cancelled():
        task.exception()
