"""The way from generate functions to the engine, which the end of a step closes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollfeed.completions import Limits, check_completion
from rollfeed.pipeline.groups.step_clock import Activity, StepClock
from rollfeed.protocols import Engine
from rollfeed.types import Completion, CompletionTimings, FinishKind, FinishReason, Picture, SamplingParams


class EngineGate:
    """An endpoint that holds a number of requests at the engine, and none once it is closed.

    A closed gate answers at once with an empty completion that says ABORT, so that no request can
    start after the step's abort, wherever in its turns a generate function is.
    """

    def __init__(self, engine: Engine, *, max_requests_in_flight: int | None, clock: StepClock | None = None) -> None:
        self._engine = engine
        self._clock = clock or StepClock()
        self._permits = asyncio.Semaphore(max_requests_in_flight or 2 * engine.max_running_requests)
        self._closed = False
        self._limits = Limits(
            vocab_size=engine.vocab_size,
            context_length=engine.context_length,
            newest_version=engine.policy_version,
            is_exact=engine.is_exact,
        )
        self.num_at_engine = 0

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def is_closed(self) -> bool:
        """Whether no request is let through."""
        return self._closed

    @property
    def limits(self) -> Limits:
        """The range of the engine's tokens; versions that were published once may still come."""
        self._see_version()
        return self._limits

    async def generate(
        self, token_ids: NDArray[np.int32], params: SamplingParams, *, request_id: str, images: Sequence[Picture] = ()
    ) -> Completion:
        """As :meth:`rollfeed.protocols.TokenEndpoint.generate`; what comes is checked, whoever the engine is."""
        async with self._permits:
            if self._closed:
                return self._aborted(len(token_ids))
            self.num_at_engine += 1
            self._see_version()
            self._clock.begin(Activity.GENERATE)
            try:
                completion = await self._engine.generate(token_ids, params, request_id=request_id, images=images)
            finally:
                self._clock.end(Activity.GENERATE)
                self.num_at_engine -= 1
        check_completion(completion, num_prompt_tokens=len(token_ids), params=params, limits=self.limits, images=images)
        return completion

    def close(self) -> None:
        """Let no further request through."""
        self._closed = True

    def open(self) -> None:
        """Let requests through again, for the next step."""
        self._closed = False

    def _see_version(self) -> None:
        version = self._engine.policy_version
        if version > self._limits.newest_version:
            self._limits = replace(self._limits, newest_version=version)

    async def abort_all(self) -> None:
        await self._engine.abort()

    def _aborted(self, num_prompt_tokens: int) -> Completion:
        return Completion(
            token_ids=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            text="",
            finish_reason=FinishReason(FinishKind.ABORT),
            version_spans=(),
            precision=self._engine.precision,
            prompt_tokens=num_prompt_tokens,
            cached_tokens=0,
            timings=CompletionTimings(0.0, 0.0),
        )
