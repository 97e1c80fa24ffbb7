import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rollfeed.batch import AgeLimit, cut_batch
from rollfeed.buffer import Buffer, fifo
from rollfeed.config import AdvantageSettings, RolloutMode, RolloutSettings, StalenessPolicy
from rollfeed.generate import single_turn
from rollfeed.pipeline import GroupPlan, Observers, RolloutParts, Rollouts, Scheduler
from rollfeed.protocols import Engine, PromptSource, RolloutObserver, Scorer, Services
from rollfeed.testing import CharTokenizer, ListSource
from rollfeed.types import (
    Completion,
    CompletionTimings,
    Correct,
    Drop,
    EngineLoad,
    FilterDecision,
    FinishKind,
    FinishReason,
    Keep,
    Prompt,
    Rollout,
    RunState,
    Sample,
    SamplingParams,
    StepCommit,
    Verdict,
    VersionSpan,
)


class DigitScorer(Scorer):
    """Reward is the number that the response is."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
        del prompt
        self.num_calls += 1
        return [Verdict(reward=float(r.samples[-1].response or 0), correct=Correct.YES) for r in rollouts]


def keep_all(samples: Sequence[Sample]) -> FilterDecision:
    del samples
    return Keep()


def drop_equal(samples: Sequence[Sample]) -> FilterDecision:
    rewards = {sample.get_reward_value() for sample in samples}
    return Drop("equal") if len(rewards) == 1 else Keep()


@pytest.fixture
def make_rollouts() -> Callable[..., Rollouts]:
    """Return a factory of managers over a scripted engine; keyword arguments are settings or parts."""

    def make(
        engine: Engine,
        *,
        source: PromptSource | None = None,
        state: RunState | None = None,
        commit: Callable[[StepCommit], None] | None = None,
        observers: Sequence[RolloutObserver] = (),
        seed: int = 0,
        max_response_len: int = 8,
        **overrides: Any,
    ) -> Rollouts:
        part_names = (
            "generate_fn",
            "rollout_fn",
            "scorer",
            "group_filter",
            "sample_hook",
            "placement",
            "weights",
            "proof",
            "buffer",
        )
        parts = {name: overrides.pop(name) for name in part_names if name in overrides}
        settings = RolloutSettings(**{"rollout_batch_size": 4, "n_samples_per_prompt": 2, **overrides})
        age_rule = AgeLimit(max_staleness=settings.max_staleness, policy=settings.staleness_policy)
        scheduler = Scheduler(settings=settings, age_rule=age_rule)
        defaults: dict[str, Any] = {
            "rollout_fn": scheduler,
            "group_filter": keep_all,
            "surplus_rule": AgeLimit(max_staleness=0, policy=StalenessPolicy.MASK)
            if settings.mask_offpolicy_in_partial_rollout and settings.mode is not RolloutMode.ASYNC
            else age_rule,
            "buffer": Buffer(fifo, n_samples_per_prompt=settings.n_samples_per_prompt, max_bytes=1 << 30),
        }
        return Rollouts(
            plan=GroupPlan(
                settings=settings,
                seed=seed,
                params=SamplingParams(max_new_tokens=max_response_len),
                max_context_length=10_000,
                generate_fn=parts.pop("generate_fn", single_turn),
                services=Services(endpoint=engine, tokenizer=CharTokenizer(), default=single_turn),
                scorer=parts.pop("scorer", None) or DigitScorer(),
                sample_hook=parts.pop("sample_hook", None),
            ),
            parts=RolloutParts(
                cut_batch=partial(cut_batch, age_rule=age_rule, reward_key=None, estimator=AdvantageSettings()),
                **{**defaults, **parts},
            ),
            source=source or ListSource([f"prompt {number}" for number in range(10)], repeat=True),
            engine=engine,
            state=state,
            commit=commit,
            observers=Observers(observers),
        )

    return make


class TickEngine:
    """Samples one token a tick for each of the first ``slots`` requests; an abort returns what there is.

    Args:
        length_of: Response tokens of a rollout, by its id.
        slots: Requests that are worked on at once; later ones queue.
    """

    precision = "ticks"
    context_length = 1_000_000
    max_running_requests = 64

    def __init__(self, length_of: Callable[[int], int], *, slots: int = 8) -> None:
        self.policy_version = 0
        self.num_ticks = 0
        self.num_tokens = 0
        self.num_idle_slots = 0
        self.asked: list[tuple[int, int]] = []
        """Rollout id and tokens it came with, beyond its prompt, of every request."""
        self._length_of = length_of
        self._slots = slots
        self._waiting: list[TickRequest] = []
        self._prompt_lengths: dict[int, int] = {}
        self._ticked: list[tuple[int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "TickEngine":
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def generate(self, token_ids, params, *, request_id: str, images=()) -> Completion:
        del images
        rollout_id = int(request_id.rpartition("rollout")[2])
        known = len(token_ids) - self._prompt_lengths.setdefault(rollout_id, len(token_ids))
        self.asked.append((rollout_id, known))
        request = TickRequest(self._length_of(rollout_id) - known, asyncio.get_running_loop().create_future())
        assert request.num_left <= params.max_new_tokens
        self._waiting.append(request)
        try:
            kind = await request.done
        finally:
            self._waiting = [each for each in self._waiting if each is not request]
        count = len(request.versions)
        starts = [i for i in range(count) if i == 0 or request.versions[i] != request.versions[i - 1]]
        spans = tuple(VersionSpan(start, end, request.versions[start]) for start, end in pairwise([*starts, count]))
        return Completion(
            token_ids=np.full(count, ord("0"), np.int32),
            logprobs=np.array([-1.0 - version for version in request.versions], np.float32),
            text="0" * count,
            finish_reason=FinishReason(kind),
            version_spans=spans,
            precision=self.precision,
            prompt_tokens=len(token_ids),
            cached_tokens=0,
            timings=CompletionTimings(0.0, 0.0),
        )

    async def abort(self, request_id: str | None = None) -> None:
        assert request_id is None
        for request in self._waiting:
            request.end(FinishKind.ABORT)

    async def update_weights(self, tensors, *, policy_version: int) -> None:
        del tensors
        self.policy_version = policy_version

    async def update_weights_from_disk(self, folder, *, policy_version: int) -> None:
        del folder
        self.policy_version = policy_version

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._waiting), waiting=0)

    def metrics(self) -> dict[str, float]:
        return {}

    async def health(self) -> None: ...

    async def tick(self, number: int) -> None:
        """Return after that many ticks in all."""
        self._ticked.append((number, reached := asyncio.get_running_loop().create_future()))
        await reached

    async def _tick(self) -> None:
        while True:
            for number, reached in self._ticked:
                if number <= self.num_ticks and not reached.done():
                    reached.set_result(None)
            self._ticked = [each for each in self._ticked if not each[1].done()]
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
class TickRequest:
    num_left: int
    done: asyncio.Future[FinishKind]
    versions: list[int] = field(default_factory=list)

    def end(self, kind: FinishKind) -> None:
        if not self.done.done():
            self.done.set_result(kind)


@pytest.fixture
def tick_engine() -> type[TickEngine]:
    return TickEngine
