"""One request of the caller, from its arrival to its answer.

Invariant: what a try has sampled is kept when the try ends early, for whatever reason, and the next
try goes on behind it.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollfeed.engine.openai.replies import Answer
from rollfeed.engine.weight_versions import joined_spans
from rollfeed.types import FinishReason, SamplingParams, VersionSpan


class Part(NamedTuple):
    """What one try has sampled: R tokens."""

    token_ids: NDArray[np.int32]
    """``(R,)``."""
    logprobs: NDArray[np.float32]
    """``(R,)``."""
    version_spans: tuple[VersionSpan, ...]


class Call:
    """A request; it may take several tries."""

    def __init__(self, *, request_id: str, prompt_ids: NDArray[np.int32], params: SamplingParams) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.parts: list[Part] = []
        self.finish: FinishReason | None = None
        """Of the last part, once the response is complete."""
        self.loose: Answer | None = None
        """The last reply that had text and no tokens; it cannot be gone on from."""
        self.cached_tokens = 0
        self.aborted = False
        self.num_tries = 0
        self.num_failures = 0
        self.num_refusals = 0
        self._scope: asyncio.Timeout | None = None
        self._try_scope: asyncio.Timeout | None = None

    @property
    def num_sampled(self) -> int:
        """Response tokens so far."""
        return sum(len(part.token_ids) for part in self.parts)

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """Prompt and response so far. ``(P + R,)``."""
        return np.concatenate([self.prompt_ids, *(part.token_ids for part in self.parts)])

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be sampled."""
        return self.params.max_new_tokens - self.num_sampled

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Which version sampled what."""
        return joined_spans((len(part.token_ids), part.version_spans) for part in self.parts)

    def scope(self) -> asyncio.Timeout:
        """Return what bounds the whole call; it raises TimeoutError where it is aborted or out of time."""
        self._scope = asyncio.timeout(None)
        return self._scope

    def try_scope(self) -> asyncio.Timeout:
        """Return what bounds one try; it raises TimeoutError where the try is interrupted."""
        self._try_scope = asyncio.timeout(None)
        return self._try_scope

    def start_clock(self, seconds: float) -> None:
        """Give the call so long from now on."""
        if self._scope is not None and not self.aborted:
            self._scope.reschedule(asyncio.get_running_loop().time() + seconds)

    def abort(self) -> None:
        """End the call with what it has, at once and wherever it waits."""
        if not self.aborted:
            self.aborted = True
            _expire(self._scope)

    def interrupt(self) -> None:
        """End the present try; the call goes on when it may."""
        _expire(self._try_scope)

    def end_try(self) -> None:
        """Be between two tries."""
        self._try_scope = None

    def end(self) -> None:
        """Be answered; nothing can end it any more."""
        self._scope = None


def _expire(scope: asyncio.Timeout | None) -> None:
    if scope is not None and not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())
