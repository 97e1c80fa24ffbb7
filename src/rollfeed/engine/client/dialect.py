"""The seam between this client and a kind of server: all that it has to know of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollfeed.config.api_key import ApiKey
from rollfeed.config.servers import ServerSettings
from rollfeed.engine.client.flights import Flight, Worker
from rollfeed.engine.client.replies import Found, Router, ServerLoad, ServerRequest
from rollfeed.engine.http import Http
from rollfeed.protocols import Tokenizer
from rollfeed.types import SamplingParams, WeightUpdate


class Context(NamedTuple):
    """Services that a dialect is handed when its engine is entered."""

    http: Http
    tokenizer: Tokenizer
    context_length: int


class Dialect(Protocol):
    """Speaks to servers of one kind.

    Addresses are those of the settings. What asks a server raises EngineUnavailableError where it does not answer in
    time or fails, and EngineProtocolError where it answers something else than it should.
    """

    setting: str
    """The settings' table, as ``engine.sglang``."""
    api_key: ApiKey
    is_exact: bool
    """Whether servers without exact tokens and logprobs are refused."""
    untied_head: bool
    """Whether new weights need an output head under its own name that is the embeddings."""
    aborts_by_closing: bool
    """Whether a server ends a request when its connection closes, and has to be told otherwise."""
    repeats_ids: bool
    """Whether a reply has the id of its request, as it was sent."""
    keeps_partial: bool
    """Whether a request that is ended early comes back with what it has sampled."""
    keeps_cache: bool
    """Whether what runs goes on after an update with keys and values of older weights."""
    is_alone: bool
    """Whether nobody else gives servers weights: without a copy here, one that has lost them cannot come back."""

    @property
    def settings(self) -> ServerSettings:
        """The settings of the table."""

    def open(self, context: Context) -> None:
        """Begin; called once, before anything is asked."""

    async def find_router(self) -> Router | None:
        """Return what stands in front of the servers, where the settings name it."""

    async def meet(self, address: str, *, is_behind_router: bool) -> Found:
        """Find out, once at the start, what answers, and refuse what cannot be used with the settings."""

    def check(self, params: SamplingParams) -> None:
        """Raise EngineProtocolError where the servers cannot answer such a request."""

    def request(self, flight: Flight, worker: Worker) -> ServerRequest:
        """Return what asks for the rest of a flight's response, under its present ``rid``."""

    async def health(self, address: str, *, timeout_seconds: float) -> None:
        """Return when a server says that it is healthy."""

    async def version(self, address: str, *, timeout_seconds: float | None = None) -> int | None:
        """Return the policy version that a server serves; None where it keeps no name for it."""

    async def load(self, address: str) -> ServerLoad | None:
        """Return how busy a server is; None where it does not say."""

    async def score(
        self, address: str, texts: Sequence[NDArray[np.int32]], *, policy_version: int
    ) -> NDArray[np.float64] | None:
        """Return log-probabilities of all tokens but the first of each text; None from a server that does not score."""

    async def abort(self, address: str, rid: str | None) -> None:
        """Have a server end one request, or with None all; not asked where it aborts by closing."""

    async def hold(self, address: str) -> bool:
        """Stop a server between two tokens; return whether it can, so that what runs may stay there."""

    async def release(self, address: str, *, timeout_seconds: float | None = None) -> None:
        """Let a server go on, whether it was held or not."""

    async def update(self, worker: Worker, update: WeightUpdate, *, is_held: bool) -> int:
        """Have a server load what it was prepared for, whatever runs there, leave it as it was, and return the bytes.

        Raises:
            EngineProtocolError: If it refuses; it serves the old ones.
            EngineUnavailableError: If it is not known which it serves.
        """

    async def reload(self, worker: Worker, update: WeightUpdate) -> int:
        """As :meth:`update`, of a server that has no requests of this client."""

    async def sleep(self, worker: Worker) -> None:
        """End what runs at a server, and have it give up the memory of weights, keys and values."""

    async def wake_up(self, address: str) -> None:
        """Have a server take back what :meth:`sleep` has given up."""

    def counts_late(self, workers: Sequence[Worker]) -> bool:
        """Whether one of these counts the first token of a version's span to it that still came from the last."""
