"""The engine of a run that samples nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import EngineProtocolError
from rollfeed.types import Completion, EngineLoad, SamplingParams, WeightUpdate


class IdleEngine:
    """Fits :class:`rollfeed.protocols.Engine`; knows which version the policy has, and has no weights."""

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
        self, token_ids: NDArray[np.int32], params: SamplingParams, *, request_id: str, images: Sequence[str] = ()
    ) -> Completion:
        """Raise EngineProtocolError: no request can be served."""
        raise EngineProtocolError("there is no engine: with rollout.mode = 'sft' nothing is sampled")

    async def abort(self, request_id: str | None = None) -> None:
        """Nothing runs."""

    async def pause(self) -> None:
        """Nothing runs."""

    async def resume(self) -> None:
        """Nothing runs."""

    async def apply(self, update: WeightUpdate) -> None:
        """Take the version."""
        self.policy_version = update.policy_version

    async def score(self, texts: Sequence[NDArray[np.int32]]) -> Mapping[str, NDArray[np.float64]]:
        """Return nothing: there are no weights that could say something."""
        return {}

    async def load(self) -> EngineLoad:
        """Return that nothing runs or waits."""
        return EngineLoad(running=0, waiting=0)

    def metrics(self) -> Mapping[str, float]:
        """Return nothing: nothing is counted."""
        return {}

    async def health(self) -> None:
        """Nothing can be wrong."""
