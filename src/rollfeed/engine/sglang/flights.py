"""One request on its way, and the places where it waits.

Invariant: a flight that is aborted leaves whatever it waits for at once, and boards nothing any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.engine.sglang.replies import Reply
from rollfeed.types import SamplingParams

if TYPE_CHECKING:
    from rollfeed.engine.sglang.workers import Worker

_ENCODER = msgspec.json.Encoder()
_SEED_MASK = (1 << 31) - 1
_SEED_STRIDE = 0x9E3779B1


class FlightAbortedError(Exception):
    """The flight was aborted while it waited on this side."""


class Flight:
    """A request from its arrival to its answer; it may take several tries."""

    __slots__ = (
        "_landed",
        "_scope",
        "_waiter",
        "aborted",
        "avoided",
        "images",
        "num_failures",
        "num_refusals",
        "params",
        "parts",
        "prompt_ids",
        "request_id",
        "rid",
        "worker",
    )

    def __init__(
        self, *, request_id: str, prompt_ids: NDArray[np.int32], params: SamplingParams, images: Sequence[str]
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.images = images
        self.parts: list[Reply] = []
        """What earlier tries have sampled; the next one goes on behind it."""
        self.aborted = False
        self.worker: Worker | None = None
        """Where it is now, if that is known."""
        self.rid = ""
        """The id of the present try; empty between two."""
        self.avoided: Worker | None = None
        """Where the last try failed."""
        self.num_failures = 0
        self.num_refusals = 0
        self._waiter: asyncio.Future[None] | None = None
        self._scope: asyncio.Timeout | None = None
        self._landed: asyncio.Event | None = None

    @property
    def num_sampled(self) -> int:
        """Response tokens so far."""
        return sum(len(part.token_ids) for part in self.parts)

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """Prompt and response so far. ``(P + R,)``."""
        if not self.parts:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, *(part.token_ids for part in self.parts)])

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be sampled."""
        return self.params.max_new_tokens - self.num_sampled

    def abort(self) -> None:
        """Let the flight end with what it has: at once where it waits, with the next reply otherwise."""
        self.aborted = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(FlightAbortedError())

    def interrupt(self) -> None:
        """Give up the present try; it raises TimeoutError where its scope ends."""
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    def interruptible(self) -> asyncio.Timeout:
        """Return a scope that :meth:`interrupt` ends."""
        self._scope = asyncio.timeout(None)
        return self._scope

    def land(self) -> None:
        """Be between two tries."""
        self.rid, self.worker, self._scope = "", None, None
        if self._landed is not None:
            self._landed.set()
            self._landed = None

    async def landing(self) -> None:
        """Return when the present try, if there is one, has ended."""
        if self.rid:
            self._landed = self._landed or asyncio.Event()
            await self._landed.wait()

    async def wait(self, waiter: asyncio.Future[None]) -> None:
        """Wait for a future that belongs to this flight.

        Raises:
            FlightAbortedError: If the flight is, or becomes, aborted.
        """
        if self.aborted:
            waiter.cancel()
            raise FlightAbortedError
        self._waiter = waiter
        try:
            await waiter
        finally:
            self._waiter = None

    async def sleep(self, seconds: float) -> None:
        """Wait so long, or until the flight is aborted; then raises as :meth:`wait`."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _complete, waiter)
        try:
            await self.wait(waiter)
        finally:
            timer.cancel()


def encode_request(flight: Flight) -> bytes:
    """Return the JSON that asks for the rest of a flight's response, under its present ``rid``."""
    body: dict[str, Any] = {
        "rid": flight.rid,
        "input_ids": flight.input_ids.tolist(),
        "sampling_params": _sampling_params(flight),
        "return_logprob": True,
        "stream": False,
    }
    if flight.params.return_sampling_mask:
        body["return_sampling_mask"] = True
    if flight.images:
        body["image_data"] = list(flight.images)
    return _ENCODER.encode(body)


def _sampling_params(flight: Flight) -> dict[str, Any]:
    params, num_sampled = flight.params, flight.num_sampled
    given: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens - num_sampled,
        "min_new_tokens": max(0, params.min_new_tokens - num_sampled),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "repetition_penalty": params.repetition_penalty,
        "skip_special_tokens": params.skip_special_tokens,
        "no_stop_trim": params.no_stop_trim,
        "spaces_between_special_tokens": params.spaces_between_special_tokens,
    }
    if params.stop:
        given["stop"] = list(params.stop)
    if params.stop_token_ids:
        given["stop_token_ids"] = list(params.stop_token_ids)
    if params.seed is not None:
        # Engines key their draws by seed and position in the reply: what goes on needs draws of its own.
        given["sampling_seed"] = (params.seed + _SEED_STRIDE * num_sampled) & _SEED_MASK
    return given


class Turnstile:
    """Lets flights pass while it is open, and holds them while it is closed."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.is_open = is_open
        self._waiters: set[asyncio.Future[None]] = set()

    def set_open(self, is_open: bool) -> None:
        """Open or close it; opening lets all that wait through."""
        self.is_open = is_open
        if is_open:
            for waiter in self._waiters:
                _complete(waiter)

    async def wait(self, flight: Flight) -> None:
        """Pass, now or when it opens; raises as :meth:`Flight.wait`."""
        while not self.is_open:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await flight.wait(waiter)
            finally:
                self._waiters.discard(waiter)


def _complete(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
