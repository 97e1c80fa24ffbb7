"""The engine behind the server: who is inside, who may come in, and which weights are served."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.base.sglang_wire import DEFAULT_VERSION, RequestError, Usage, check_num_responses, is_sample_of
from rollfeed.engine.backends.requests import Request, RequestPictures
from rollfeed.engine.local import EmbeddedEngine
from rollfeed.engine.server.metrics import ServerCounters, TokenRate
from rollfeed.errors import EngineUnavailableError
from rollfeed.protocols import PictureInput, Tokenizer
from rollfeed.types import Completion, FolderUpdate, SamplingParams, TensorUpdate

_FIRST_NAMED = 1 << 48
"""Versions that are not numbers count up from here, where no number of training steps reaches."""
_LONGEST_NAME, _MOST_NAMES = 512, 1_000
_MAX_DIGITS = len(str(_FIRST_NAMED)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerJob:
    """One response to be sampled."""

    request_id: str
    token_ids: NDArray[np.int32]
    """The prompt. ``(P,)``."""
    params: SamplingParams
    ignore_eos: bool = False
    return_logprob: bool = False
    score_from: int | None = None
    """Where the log-probabilities of the prompt begin, or None for none of them."""
    num_tops: int = 0
    """Of the likeliest tokens at each place, that are told."""
    pictures: RequestPictures | None = None
    """Of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that is served, and the limits of the server."""

    model_path: str
    name: str
    """What OpenAI clients call it."""
    created: int
    """When serving began, in seconds since 1970."""
    config: Mapping[str, Any]
    """The checkpoint's ``config.json``."""
    max_waiting: int
    """Requests that may wait; more are refused."""


class RunningJob:
    """A job inside the engine, and its completion once there is one."""

    def __init__(self, job: ServerJob, request: Request, run: Coroutine[Any, Any, Completion]) -> None:
        self.job = job
        self.request = request
        self.task = asyncio.ensure_future(run)
        self._received_at = time.monotonic()
        self._ended_at: float | None = None
        self.task.add_done_callback(self._end)

    @property
    def completion(self) -> Completion:
        """The completion of an answer that has ended well. Raises EngineError if it has not."""
        return self.task.result()

    @property
    def finish(self) -> str:
        """Why it has ended: stop, length, abort or error."""
        if self.task.cancelled():
            return "abort"
        return "error" if self.task.exception() is not None else self.completion.finish_reason.kind.value

    @property
    def seconds(self) -> float:
        """From its arrival to its end, or to now."""
        return (time.monotonic() if self._ended_at is None else self._ended_at) - self._received_at

    def _end(self, _task: object) -> None:
        self._ended_at = time.monotonic()


class WeightVersions:
    """Maps both ways: ``default`` is 0, digits are that integer, other names get integers of their own."""

    def __init__(self) -> None:
        self._name_of: dict[int, str] = {0: DEFAULT_VERSION}
        self._number_of: dict[str, int] = {DEFAULT_VERSION: 0}
        self._next_number = _FIRST_NAMED

    def number(self, name: str, *, served: int = 0) -> int:
        """Return the integer of a version's name, which :meth:`name` will give back.

        The names of the last thousand are kept, and that of ``served`` however many are refused meanwhile.
        """
        number = self._number_of.pop(name, None)
        if len(name) > _LONGEST_NAME:
            raise RequestError(f"a version's name has at most {_LONGEST_NAME} characters")
        if number is None:
            number = int(name) if name.isascii() and name.isdigit() and len(name) <= _MAX_DIGITS else self._new_number()
        self._number_of[name], self._name_of[number] = number, name
        if len(self._number_of) > _MOST_NAMES:
            oldest = next(each for each, old in self._number_of.items() if old != served)
            self._name_of.pop(self._number_of.pop(oldest), None)
        return number

    def name(self, number: int) -> str:
        """Return the name that an integer was last given, else its digits."""
        return self._name_of.get(number, str(number))

    def _new_number(self) -> int:
        self._next_number += 1
        return self._next_number


class Service:
    """Runs jobs on an entered engine; belongs to one event loop.

    At most ``max_running_requests + max_waiting`` requests are inside, so that memory is bounded;
    they start in the order in which they came.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        *,
        tokenizer: Tokenizer,
        model: ServedModel,
        picture_input: PictureInput | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model = model
        self.picture_input = picture_input
        """What brings pictures into prompts, where the model takes any."""
        self.model_path = model.model_path
        """Where the weights came from last."""
        self.versions = WeightVersions()
        self.counters = ServerCounters()
        self.is_paused = False
        self._inside: dict[RunningJob, None] = {}
        self._throughput = TokenRate()
        self._control = asyncio.Lock()
        self._tasks: set[asyncio.Future[None]] = set()

    @property
    def capacity(self) -> int:
        """Most requests inside at once."""
        return self.engine.max_running_requests + self.model.max_waiting

    @property
    def weight_version(self) -> str:
        """The version that the next token will be sampled by."""
        return self.versions.name(self.engine.policy_version)

    def start(self, jobs: Sequence[ServerJob], *, on_progress: Callable[[], None] | None = None) -> list[RunningJob]:
        """Let jobs in, all or none; to be followed by :meth:`wait` or :meth:`drop`.

        ``on_progress`` is called on this event loop after new tokens and after each end.

        Raises:
            RequestError: If too many wait (429), or the jobs are more than can ever be inside (400).
            EngineProtocolError: If one can never be served.
        """
        check_num_responses(len(jobs), self.capacity)
        if len(self._inside) + len(jobs) > self.capacity:
            self.counters.num_refused += len(jobs)
            raise RequestError(
                f"the waiting queue is full ({self.model.max_waiting} requests); try again later", status=429
            )
        notify = None if on_progress is None else _threadsafe(on_progress)
        requests = [
            self.engine.new_request(
                job.token_ids,
                job.params,
                request_id=job.request_id,
                ignore_eos=job.ignore_eos,
                score_from=job.score_from,
                num_tops=job.num_tops,
                on_progress=notify,
                pictures=job.pictures,
            )
            for job in jobs
        ]
        answers = [
            RunningJob(job, request, self.engine.run(request)) for job, request in zip(jobs, requests, strict=True)
        ]
        for answer in answers:
            self._inside[answer] = None
            answer.task.add_done_callback(functools.partial(self._leave, answer, on_progress))
        return answers

    async def wait(self, answers: Sequence[RunningJob]) -> None:
        """Return when all have ended; when one fails, or this is cancelled, the others are dropped.

        Raises:
            EngineError: If one fails.
        """
        try:
            await asyncio.gather(*(answer.task for answer in answers))
        finally:
            self.drop(answers)

    @asynccontextmanager
    async def progress(self, jobs: Sequence[ServerJob]) -> AsyncIterator[tuple[list[RunningJob], AsyncIterator[int]]]:
        """Run jobs; give the answers, and the index of an answer whenever it has more tokens or has ended.

        Tokens that come while the client is slow are told together. Leaving drops what still runs.
        """
        changed = asyncio.Event()
        answers = self.start(jobs, on_progress=changed.set)
        try:
            yield answers, _changes(answers, changed)
        finally:
            self.drop(answers)

    def drop(self, answers: Iterable[RunningJob]) -> None:
        """Abort answers that nobody waits for any more."""
        for answer in answers:
            answer.task.cancel()

    def _leave(self, answer: RunningJob, on_progress: Callable[[], None] | None, _task: object) -> None:
        del self._inside[answer]
        counters = self.counters
        counters.requests_by_reason[answer.finish] += 1
        counters.request_seconds += answer.seconds
        counters.generated_tokens += answer.request.num_new_tokens
        counters.prompt_tokens += len(answer.job.token_ids)
        counters.cached_tokens += answer.request.cached_tokens
        if answer.finish not in ("abort", "error"):
            counters.queue_seconds += answer.completion.timings.queue_seconds
        self._throughput.note(time.monotonic(), self.generated_tokens)
        if on_progress is not None:
            on_progress()

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled since the start."""
        return self.counters.generated_tokens + sum(answer.request.num_new_tokens for answer in self._inside)

    def _rate(self) -> float:
        now, total = time.monotonic(), self.generated_tokens
        rate = self._throughput.rate(now, total)
        self._throughput.note(now, total)
        return rate

    def usage(self) -> Usage:
        """Return what is inside the engine."""
        started = [answer.request for answer in self._inside if answer.request.is_started]
        waiting = [answer for answer in self._inside if not answer.request.is_started]
        # Requests whose clients have just left may still hold a slot until the next step.
        num_running = self.engine.num_running
        slots, counters = self.engine.max_running_requests, self.counters
        return Usage(
            num_running=num_running,
            num_waiting=max(0, len(self._inside) - num_running),
            num_used_tokens=sum(request.num_tokens for request in started),
            num_uncached_tokens=sum(len(answer.job.token_ids) for answer in waiting),
            max_total_tokens=slots * self.engine.context_length,
            max_running=slots,
            tokens_per_second=self._rate(),
            generated_tokens=self.generated_tokens,
            cache_hit_rate=counters.cached_tokens / max(1, counters.prompt_tokens),
        )

    async def abort(self, request_id: str | None) -> None:
        """Abort the samples of one request, or everything; unknown ids are fine."""
        # All at one point: a sample that waits must not take the place of one that has just been aborted.
        await self.engine.abort_where(lambda known: request_id is None or is_sample_of(known, request_id))

    async def pause(self, mode: str) -> None:
        """Hold between two tokens; ``mode`` is abort, retract or in_place."""
        if mode not in ("abort", "retract", "in_place"):
            raise RequestError(f"mode is {mode!r}: must be one of abort, retract, in_place")
        async with self._control:
            await self.engine.pause(mode)
            self.is_paused = True

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        async with self._control:
            await self.engine.resume()
            self.is_paused = False

    async def update_from_disk(self, model_path: str, version: str | None, *, abort_running: bool) -> None:
        """Replace the weights by those of a folder, all or none of them.

        Raises:
            EngineProtocolError: If they cannot be read, or do not fit.
        """
        async with self._control:
            number = self.engine.policy_version if version is None else self._number(version)
            await self.engine.apply(FolderUpdate(Path(model_path), policy_version=number), abort_running=abort_running)
            self.model_path = model_path

    async def update_from_tensors(self, tensors: Mapping[str, Any], version: str) -> None:
        """Replace weights by tensors, all or none of them. Raises EngineProtocolError if they do not fit."""
        async with self._control:
            await self.engine.apply(TensorUpdate(tensors, policy_version=self._number(version)))

    async def set_version(self, version: str, *, abort_running: bool) -> None:
        """Name the weights that are served."""
        async with self._control:
            number = self._number(version)
            await self.engine.apply(TensorUpdate({}, policy_version=number), abort_running=abort_running)

    def _number(self, version: str) -> int:
        return self.versions.number(version, served=self.engine.policy_version)

    async def flush_cache(self) -> None:
        """Forget prefixes that could be shared."""
        async with self._control:
            await self.engine.apply(TensorUpdate({}, policy_version=self.engine.policy_version))

    async def check_health(self, job: ServerJob, *, timeout_seconds: float) -> None:
        """Return when a token has been made.

        While the engine is paused on purpose, or full, a token cannot be asked for; then its
        thread has to answer.

        Raises:
            EngineUnavailableError: If nothing comes in time.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                if self.is_paused or len(self._inside) >= self.engine.max_running_requests:
                    await self.engine.abort("nobody")
                    return
                with suppress(RequestError):
                    await self.wait(self.start([job]))
        except TimeoutError:
            raise EngineUnavailableError(f"no token within {timeout_seconds:g} s") from None

    async def to_the_end(self, action: Coroutine[Any, Any, None]) -> None:
        """Carry out a control action wholly, even when the client that asked for it goes away."""
        task = asyncio.ensure_future(action)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        await asyncio.shield(task)

    def _forget(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its client is told; without one, nobody need be


async def _changes(answers: Sequence[RunningJob], changed: asyncio.Event) -> AsyncIterator[int]:
    seen = [0] * len(answers)
    left = set(range(len(answers)))
    while left:
        await changed.wait()
        changed.clear()
        for index in sorted(left):
            answer = answers[index]
            if answer.task.done():
                left.discard(index)
                yield index
            elif answer.request.num_published > seen[index]:
                seen[index] = answer.request.num_published
                yield index


def _threadsafe(callback: Callable[[], None]) -> Callable[[], None]:
    """Return what the engine's thread may call to have ``callback`` called on this event loop."""
    loop = asyncio.get_running_loop()

    def call() -> None:
        # A loop that has ended has nobody to tell.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(callback)

    return call
