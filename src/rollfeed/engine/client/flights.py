"""One request on its way, the server that it is at, and the places where it waits.

Invariant: a flight that is aborted leaves whatever it waits for at once, and boards nothing any more.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollfeed.engine.client.replies import IncomingReply, Reply, ServerLoad
from rollfeed.errors import EngineProtocolError
from rollfeed.protocols import PictureProcessor
from rollfeed.routing import current_affinity
from rollfeed.types import FinishKind, FinishReason, Picture, PlaceholderRange, SamplingParams


class FlightAbortedError(Exception):
    """The flight was aborted while it waited on this side."""


class ShownPictures(NamedTuple):
    """The pictures of a flight, as servers are sent them."""

    pictures: tuple[Picture, ...]
    places: tuple[PlaceholderRange, ...]
    """Among the tokens of the prompt."""
    whole_ids: NDArray[np.int32]
    """The prompt."""
    prompt_ids: NDArray[np.int32]
    """The prompt with a single placeholder for each, which servers make as many of as it takes."""
    data_uris: tuple[str, ...]

    @classmethod
    def of(
        cls, prompt_ids: NDArray[np.int32], pictures: Sequence[Picture], processor: PictureProcessor | None
    ) -> ShownPictures:
        """Raises EngineProtocolError if nothing takes pictures, or they do not fit the prompt."""
        if processor is None:
            raise EngineProtocolError("the servers' model takes text only, no images")
        try:
            places = processor.locate(prompt_ids, pictures)
        except ValueError as error:
            raise EngineProtocolError(f"the input's tokens and its pictures do not go together: {error}") from error
        uris = tuple(map(processor.data_uri, pictures))
        return cls(tuple(pictures), places, prompt_ids, processor.collapse(prompt_ids, pictures), uris)


class Flight:
    """A request from its arrival to its answer; it may take several tries."""

    def __init__(
        self,
        *,
        request_id: str,
        prompt_ids: NDArray[np.int32],
        params: SamplingParams,
        shown: ShownPictures | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.shown = shown
        """Its pictures, if it has any."""
        self.affinity = current_affinity()
        """Of who makes it."""
        self.parts: list[Reply] = []
        """What earlier tries have sampled; the next one goes on behind it."""
        self.approximate: Reply | None = None
        """The last reply that is not exact; it cannot be gone on from."""
        self.finish: FinishReason | None = None
        """Of the last try."""
        self.aborted = False
        self.is_put_back = False
        """Whether it is to wait for its turn again when its present try has ended."""
        self.number = 0
        """Place among those that wait for their turn; the least comes first."""
        self.served_seconds = 0.0
        """Without its waits for a turn, up to the end of the last one."""
        self.sent = 0.0
        """When its present try was sent, by the event loop's time."""
        self.worker: Worker | None = None
        """Where it is now, if that is known."""
        self.policy_version = 0
        """The version that was current when its present try was sent."""
        self.rid = ""
        """The id of the present try; empty between two."""
        self.answer: IncomingReply | None = None
        """What the present try has sampled so far."""
        self.avoided: Worker | None = None
        """Where the last try failed."""
        self.num_failures = 0
        self.num_refusals = 0
        self.was_rejected = False
        """Whether a reply to it was one that cannot be, and another server has been asked."""
        self._waiter: asyncio.Future[None] | None = None
        self._scope: asyncio.Timeout | None = None
        self._landed: asyncio.Event | None = None

    @property
    def num_sampled(self) -> int:
        """Response tokens so far."""
        return sum(len(part.token_ids) for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """Response tokens so far, as far as is known of the present try."""
        return self.num_sampled + (self.answer.num_tokens if self.answer is not None else 0)

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """Prompt and response so far. ``(P + R,)``."""
        if not self.parts:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, *(part.token_ids for part in self.parts)])

    @property
    def sent_ids(self) -> NDArray[np.int32]:
        """The same as servers are sent it, which expand placeholders themselves."""
        if self.shown is None:
            return self.input_ids
        return np.concatenate([self.shown.prompt_ids, *(part.token_ids for part in self.parts)])

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be sampled."""
        return self.params.max_new_tokens - self.num_sampled

    def keep(self, reply: Reply) -> bool:
        """Have what a try has sampled; return whether another can go on from there."""
        self.finish = reply.finish_reason
        if not reply.is_exact:
            self.approximate = reply
            return False
        lacks_experts = self.params.return_routed_experts and reply.routed_experts is None
        if lacks_experts and self.finish.kind is FinishKind.ABORT and len(reply.token_ids) == self.remaining_tokens:
            reply = reply.without_last()  # with the next try experts of all tokens come
        if len(reply.token_ids):
            self.parts.append(reply)
        return bool(len(reply.token_ids))

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
        self.rid, self.worker, self.answer, self._scope = "", None, None, None
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


class Worker:
    """One server."""

    def __init__(self, address: str, *, is_exact: bool = False) -> None:
        self.address = address
        self.is_exact = is_exact
        """Whether it is known to begin no step before the last one has ended."""
        self.is_live = True
        """Healthy, at the current version, and given requests."""
        self.is_unsure = False
        """Whether it may have been started again, with other weights, since it last told its version."""
        self.must_reload = False
        """Whether it needs its weights again, whatever version it tells: an update of them has not ended well."""
        self.problem: str | None = None
        """Why it cannot come back before new weights have been published."""
        self.num_failed_probes = 0
        self.num_rejected = 0
        """Replies of it that cannot be."""
        self.flights: set[Flight] = set()
        self.suspected = asyncio.Event()
        """Set to have it probed now."""
        self.load: ServerLoad | None = None
        """By its last word."""
        self.room = math.inf
        """Flights that it takes without making one wait or putting one back, by that word."""

    @property
    def num_requests(self) -> int:
        return len(self.flights)

    @property
    def num_waiting(self) -> int:
        """None beside those: ``room`` is by what waits there."""
        return 0

    @property
    def kv_use(self) -> float | None:
        """All of it where there is no ``room``, which is by what it says; None otherwise."""
        return None if self.has_room else 1.0

    @property
    def has_room(self) -> bool:
        """Whether it takes a further flight so."""
        return len(self.flights) < self.room


class Turnstile:
    """Lets flights pass while it is open, and holds them while it is closed."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.is_open = is_open
        self._waiters: set[asyncio.Future[None]] = set()

    def set_open(self, is_open: bool) -> None:
        """Open or close it; opening lets all that wait through."""
        self.is_open = is_open
        if is_open:
            self.wake()

    def wake(self) -> None:
        """Have all that wait look again."""
        for waiter in self._waiters:
            _complete(waiter)

    async def wait(self, flight: Flight) -> None:
        """Pass, now or when it opens; raises as :meth:`Flight.wait`."""
        while not self.is_open:
            await self.look_again(flight)

    async def look_again(self, flight: Flight) -> None:
        """Return when it has opened or somebody wakes; raises as :meth:`Flight.wait`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await flight.wait(waiter)
        finally:
            self._waiters.discard(waiter)


def _complete(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
