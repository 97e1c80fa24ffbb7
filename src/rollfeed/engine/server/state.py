"""Plain records that the server's modules hand to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollfeed.types import SamplingParams


class RequestError(Exception):
    """A request cannot be served; the client is told the HTTP status and one line."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Usage(NamedTuple):
    """What is inside the engine right now."""

    num_running: int
    num_waiting: int
    num_used_tokens: int
    """Prompt and sampled tokens of running requests."""
    num_uncached_tokens: int
    """Prompt tokens of waiting requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One response to be sampled."""

    request_id: str
    token_ids: NDArray[np.int32]
    """The prompt. ``(P,)``."""
    params: SamplingParams
    ignore_eos: bool = False
    return_logprob: bool = False
    score_from: int | None = None
    """Where the log-probabilities of the prompt begin, or None for none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is served, and within which limits."""

    model_path: str
    name: str
    """What OpenAI clients call it."""
    created: int
    """When serving began, in seconds since 1970."""
    config: Mapping[str, Any]
    """The checkpoint's ``config.json``."""
    max_waiting: int
    """Requests that may wait; more are refused."""
