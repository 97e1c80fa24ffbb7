"""An engine that answers from a script: in a given or random order, with faults, without a model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import pairwise
from random import Random

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import EngineUnavailableError
from rollfeed.protocols import Engine
from rollfeed.testing.prompts import END_OF_TURN, CharTokenizer
from rollfeed.types import (
    Completion,
    CompletionTimings,
    EngineLoad,
    FinishKind,
    FinishReason,
    Picture,
    SamplingParams,
    VersionSpan,
    WeightUpdate,
)


class Fault(StrEnum):
    """Faults of a scripted request: it does this instead of answering."""

    RAISE = "raise"
    HANG = "hang"
    """Never answers; an abort or a cancellation ends it."""
    DEAF = "deaf"
    """Never answers and ignores aborts; only a cancellation ends it."""


@dataclass(slots=True)
class ScriptedRequest:
    """One request as the engine received it."""

    request_id: str
    token_ids: NDArray[np.int32]
    params: SamplingParams
    done: asyncio.Future[Completion]


Answer = Callable[[ScriptedRequest], str]
FaultOf = Callable[[ScriptedRequest], Fault | None]
NextOf = Callable[[Sequence[ScriptedRequest]], int]


def answer_by_seed(request: ScriptedRequest) -> str:
    """Return one digit that depends on the prompt and the seed only."""
    key = f"{request.params.seed}/{request.token_ids.tolist()}".encode()
    return str(blake2b(key, digest_size=1).digest()[0] % 10)


def in_arrival_order(waiting: Sequence[ScriptedRequest]) -> int:
    """Answer the oldest request first."""
    del waiting
    return 0


class _WithoutWeights(Engine):
    """Of an engine, what has to do with weights that it does not have."""

    policy_version = 0
    vocab_size = sys.maxunicode + 1
    is_exact = True

    async def apply(self, update: WeightUpdate) -> None:
        """Take the version; there are no weights."""
        self.policy_version = update.policy_version


class ScriptedEngine(_WithoutWeights):
    """Fits :class:`rollfeed.protocols.Engine`.

    One request is answered each time the event loop has nothing else to do, so that many are in
    flight together; which one is ``next_of``'s choice.

    ``answer`` makes the text of a response; ``next_of`` chooses among those that wait, or ``random_order``, a seed.
    Later ones than ``max_running_requests`` queue.
    """

    precision = "scripted"
    context_length = 1_000_000

    def __init__(
        self,
        *,
        answer: Answer = answer_by_seed,
        next_of: NextOf = in_arrival_order,
        random_order: int | None = None,
        fault_of: FaultOf | None = None,
        max_running_requests: int = 64,
    ) -> None:
        self.max_running_requests = max_running_requests
        self.requests: list[ScriptedRequest] = []
        """Everything ever asked, in order of arrival."""
        self.num_aborts = 0
        self._answer = answer
        self._fault_of = fault_of
        self._waiting: list[ScriptedRequest] = []
        self._tokenizer = CharTokenizer()
        self._worker: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        random = Random(random_order)
        self._next_of = next_of if random_order is None else lambda waiting: random.randrange(len(waiting))

    async def __aenter__(self) -> ScriptedEngine:
        self._worker = asyncio.create_task(self._answer_one_by_one(), name="scripted engine")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._worker is not None
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)
        self._worker = None
        for request in self._waiting:
            request.done.cancel()

    async def generate(
        self, token_ids: NDArray[np.int32], params: SamplingParams, *, request_id: str, images: Sequence[Picture] = ()
    ) -> Completion:
        """Answer from the script, when the request's turn comes."""
        del images
        if self._worker is None:
            raise EngineUnavailableError("the scripted engine is not running; use it inside `async with`")
        request = ScriptedRequest(request_id, token_ids, params, asyncio.get_running_loop().create_future())
        self.requests.append(request)
        if self._fault(request) is Fault.RAISE:
            raise EngineUnavailableError(f"scripted fault for {request_id}")
        self._waiting.append(request)
        self._work.set()
        try:
            return await request.done
        finally:
            if request in self._waiting:
                self._waiting.remove(request)

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request or all; those that are deaf stay."""
        self.num_aborts += 1
        for request in list(self._waiting):
            if request_id in (None, request.request_id) and self._fault(request) is not Fault.DEAF:
                self._finish(request, "", FinishKind.ABORT)

    async def pause(self) -> None:
        """Answer nothing until :meth:`resume`."""
        self._running.clear()

    async def resume(self) -> None:
        """Answer again."""
        self._running.set()

    async def load(self) -> EngineLoad:
        running = min(len(self._waiting), self.max_running_requests)
        return EngineLoad(running=running, waiting=len(self._waiting) - running)

    async def health(self) -> None:
        """Return while entered."""
        if self._worker is None:
            raise EngineUnavailableError("the scripted engine is not running")

    def _fault(self, request: ScriptedRequest) -> Fault | None:
        return self._fault_of(request) if self._fault_of is not None else None

    async def _answer_one_by_one(self) -> None:
        while True:
            await self._work.wait()
            await self._running.wait()
            # Lets everything that is ready run first, so that requests pile up as they do at a busy engine.
            await asyncio.sleep(0)
            ready = [r for r in self._waiting[: self.max_running_requests] if self._fault(r) is None]
            if not ready:
                self._work.clear()
                continue
            request = ready[self._next_of(ready)]
            self._finish(request, self._answer(request), FinishKind.STOP)

    def _finish(self, request: ScriptedRequest, text: str, kind: FinishKind) -> None:
        self._waiting.remove(request)
        if request.done.done():
            return
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if kind is FinishKind.STOP:
            token_ids = np.append(token_ids, np.int32(END_OF_TURN))
        if len(token_ids) > request.params.max_new_tokens:
            token_ids, kind = token_ids[: request.params.max_new_tokens], FinishKind.LENGTH
        spans = (VersionSpan(0, len(token_ids), self.policy_version),) if len(token_ids) else ()
        completion = Completion(
            token_ids=token_ids,
            logprobs=np.full(len(token_ids), -1.0, np.float32),
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            finish_reason=FinishReason(kind, END_OF_TURN if kind is FinishKind.STOP else None),
            version_spans=spans,
            precision=self.precision,
            prompt_tokens=len(request.token_ids),
            cached_tokens=0,
            timings=CompletionTimings(0.0, 0.0),
        )
        request.done.set_result(completion)


class TickEngine(_WithoutWeights):
    """Samples one token a tick for each of the first ``slots`` requests; an abort returns what there is.

    ``length_of`` gives the response tokens of a rollout, by its id, which ends the request's id.
    """

    precision = "ticks"
    context_length = 1_000_000
    max_running_requests = 64

    def __init__(self, length_of: Callable[[int], int], *, slots: int = 8) -> None:
        self.num_ticks = 0
        self.num_tokens = 0
        self.num_idle_slots = 0
        self.asked: list[tuple[int, int]] = []
        """Rollout id and tokens it came with, beyond its prompt, of every request."""
        self._length_of = length_of
        self._slots = slots
        self._waiting: list[_TickRequest] = []
        self._prompt_lengths: dict[int, int] = {}
        self._awaited: list[tuple[int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> TickEngine:
        self._task = asyncio.create_task(self._run(), name="tick engine")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def generate(
        self, token_ids: NDArray[np.int32], params: SamplingParams, *, request_id: str, images: Sequence[Picture] = ()
    ) -> Completion:
        """Sample as many tokens as the rollout still lacks; the logprob of each tells the version that sampled it."""
        del images
        rollout_id = int(request_id.rpartition("rollout")[2])
        known = len(token_ids) - self._prompt_lengths.setdefault(rollout_id, len(token_ids))
        self.asked.append((rollout_id, known))
        request = _TickRequest(self._length_of(rollout_id) - known, asyncio.get_running_loop().create_future())
        assert request.num_left <= params.max_new_tokens
        self._waiting.append(request)
        try:
            kind = await request.done
        finally:
            self._waiting = [each for each in self._waiting if each is not request]
        versions, count = request.versions, len(request.versions)
        starts = [index for index in range(count) if index == 0 or versions[index] != versions[index - 1]]
        return Completion(
            token_ids=np.full(count, ord("0"), np.int32),
            logprobs=np.array([-1.0 - version for version in versions], np.float32),
            text="0" * count,
            finish_reason=FinishReason(kind),
            version_spans=tuple(VersionSpan(start, end, versions[start]) for start, end in pairwise([*starts, count])),
            precision=self.precision,
            prompt_tokens=len(token_ids),
            cached_tokens=0,
            timings=CompletionTimings(0.0, 0.0),
        )

    async def abort(self, request_id: str | None = None) -> None:
        assert request_id is None
        for request in self._waiting:
            request.end(FinishKind.ABORT)

    async def pause(self) -> None:
        """Go on: ticks are nobody's to stop."""

    resume = health = pause

    async def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._waiting), waiting=0)

    async def tick(self, number: int) -> None:
        """Return after that many ticks in all."""
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.append((number, reached))
        await reached

    async def _run(self) -> None:
        while True:
            for number, reached in self._awaited:
                if number <= self.num_ticks and not reached.done():
                    reached.set_result(None)
            self._awaited = [each for each in self._awaited if not each[1].done()]
            for _ in range(4):  # what has ended is settled, and what follows is submitted, between two ticks
                await asyncio.sleep(0)
            running = [each for each in self._waiting if not each.done.done()][: self._slots]
            self.num_ticks += 1
            self.num_tokens += len(running)
            self.num_idle_slots += self._slots - len(running)
            for request in running:
                request.versions.append(self.policy_version)
                if len(request.versions) == request.num_left:
                    request.end(FinishKind.STOP)


@dataclass(slots=True)
class _TickRequest:
    num_left: int
    done: asyncio.Future[FinishKind]
    versions: list[int] = field(default_factory=list)
    """Of each token."""

    def end(self, kind: FinishKind) -> None:
        if not self.done.done():
            self.done.set_result(kind)
