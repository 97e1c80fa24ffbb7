"""The engine of a run that samples nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import EngineProtocolError
from rollfeed.protocols import Engine
from rollfeed.types import Completion, EngineLoad, Picture, SamplingParams, WeightUpdate


class IdleEngine(Engine):
    """Knows which version the policy has, and has no weights; nothing ever runs."""

    precision = ""
    max_running_requests = 1
    is_exact = True
    policy_version = 0

    def __init__(self, *, context_length: int, vocab_size: int) -> None:
        self.context_length = context_length
        self.vocab_size = vocab_size

    async def __aenter__(self) -> IdleEngine:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Nothing was started."""

    async def generate(
        self, token_ids: NDArray[np.int32], params: SamplingParams, *, request_id: str, images: Sequence[Picture] = ()
    ) -> Completion:
        """Raise EngineProtocolError: no request can be served."""
        raise EngineProtocolError("there is no engine: with rollout.mode = 'sft' nothing is sampled")

    async def abort(self, request_id: str | None = None) -> None:
        """Nothing runs."""

    async def pause(self) -> None:
        """Nothing runs."""

    resume = health = pause

    async def apply(self, update: WeightUpdate) -> None:
        """Take the version."""
        self.policy_version = update.policy_version

    async def load(self) -> EngineLoad:
        """Return that nothing runs or waits."""
        return EngineLoad(running=0, waiting=0)
