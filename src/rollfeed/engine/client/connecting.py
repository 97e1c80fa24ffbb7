"""Finding out what is behind the addresses in the settings: once at the start, and whether it sees before it has to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from rollfeed.base.waiting import telling_of_waiting
from rollfeed.engine.client.dialect import Dialect
from rollfeed.engine.client.flights import Flight, ShownPictures, Turnstile, Worker
from rollfeed.engine.client.replies import Found, Reply, Router
from rollfeed.engine.http import Failure, TryFailedError
from rollfeed.errors import EngineProtocolError, EngineUnavailableError, PictureMismatchError
from rollfeed.protocols import PictureProcessor
from rollfeed.types import FinishKind, SamplingParams

_POLL_SECONDS = 0.2
_TOLD_AFTER_SECONDS = 5.0
_MOST_SIGHT_TOKENS = 16
"""The first ones alone may be certain, whatever there is to see."""
_SAME_LOGPROB = 1e-5

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Servers(NamedTuple):
    """The servers that answered."""

    router: Router | None
    found: Mapping[str, Found]
    """By the address of the worker."""
    policy_version: int
    """The newest of theirs."""

    def is_behind(self, found: Found) -> bool:
        """Whether a server has an older version, as one that a publisher which was killed had not reached."""
        return found.policy_version is not None and found.policy_version < self.policy_version

    @property
    def precision(self) -> str:
        """Precision that they compute in, as far as they tell."""
        return "+".join(sorted({each.precision for each in self.found.values()}))


async def connect(dialect: Dialect) -> Servers:
    """Wait until every server is healthy, and return what they are.

    Raises:
        EngineUnavailableError: If one is not healthy in time.
        EngineProtocolError: If something else answers than what is configured.
    """
    patiently = partial(_patiently, seconds=dialect.settings.startup_timeout_seconds)
    router = await patiently(dialect.find_router, of=f"{dialect.setting}.router")
    addresses: Sequence[str] = dialect.settings.addresses
    if router is not None:
        addresses = await patiently(partial(_list_workers, router, setting=dialect.setting), of=router.address)
    meet = partial(dialect.meet, is_behind_router=router is not None)
    found = await asyncio.gather(*(patiently(partial(meet, address), of=address) for address in addresses))
    return Servers(router, dict(zip(addresses, found, strict=True)), max(each.policy_version or 0 for each in found))


async def _patiently(ask: Callable[[], Awaitable[T]], *, of: str, seconds: float) -> T:
    """Ask until there is an answer, as long as servers may take to start; ``of`` says who is asked."""
    last, limit = f"{of}: no answer", "startup_timeout_seconds"

    def tell(waited: str) -> None:
        _log.info("waiting for a server, %s: %s", waited, last)

    telling = telling_of_waiting(tell, most_seconds=_TOLD_AFTER_SECONDS, limit_seconds=seconds, limit=limit)
    try:
        async with telling, asyncio.timeout(seconds):
            while True:
                try:
                    return await ask()
                except EngineUnavailableError as error:
                    last = str(error)
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise EngineUnavailableError(f"not there within {limit} = {seconds:g}: {last}") from None


async def _list_workers(router: Router, *, setting: str) -> Sequence[str]:
    addresses = tuple(await router.workers())
    if not addresses:
        raise EngineUnavailableError(f"{setting}.router = {router.address}: it lists no workers")
    return addresses


class Sight:
    """Knows which servers see, and asks those of which that is not known.

    Args:
        pictures: The model's processor.
        version: The weights' version; None while they change.
        ask: Sends a request to a server once, and returns its reply.
    """

    def __init__(
        self,
        pictures: PictureProcessor | None,
        *,
        version: Callable[[], int | None],
        ask: Callable[[Flight, Worker], Awaitable[Reply]],
    ) -> None:
        self._pictures, self._version, self._ask = pictures, version, ask
        self._seeing: set[str] = set()
        """Addresses."""
        self._turns: dict[str, Turnstile] = {}
        """By address, closed while one flight asks for all."""

    def is_unknown(self, flight: Flight, worker: Worker) -> bool:
        """Whether a flight has pictures, and it is not known that a server looks at them."""
        return flight.shown is not None and worker.address not in self._seeing

    async def find_out(self, flight: Flight, worker: Worker) -> None:
        """Ask a server, or wait until another flight has. Where weights changed meanwhile nothing is known after it.

        Raises:
            PictureMismatchError: If it does not look at what it is sent.
            EngineProtocolError: If its replies break the contract.
            TryFailedError: If it does not answer, or not to the end.
            FlightAbortedError: If the flight is aborted while it waits for another.
        """
        turn = self._turns.setdefault(worker.address, Turnstile())
        if not turn.is_open:
            await turn.wait(flight)
            return
        assert flight.shown is not None
        turn.set_open(False)
        try:
            version = self._version()
            problem = await self._problem(
                flight.shown, worker, num_tokens=min(_MOST_SIGHT_TOKENS, flight.remaining_tokens)
            )
            if version is None or version != self._version():
                return
        except (EngineProtocolError, PictureMismatchError) as error:
            raise type(error)(f"{worker.address}: {error}") from error
        finally:
            turn.set_open(True)
        if problem is not None:
            raise PictureMismatchError(f"{worker.address}: {problem}")
        self._seeing.add(worker.address)

    async def _problem(self, shown: ShownPictures, worker: Worker, *, num_tokens: int) -> str | None:
        """Ask twice what follows a prompt, once with noise for a picture, and say if the logprobs are the same."""
        assert self._pictures is not None
        params = SamplingParams(max_new_tokens=num_tokens, temperature=0.0)
        noise = self._pictures.noise(shown.pictures[0])
        said = []
        for index, uris in enumerate((shown.data_uris, (noise, *shown.data_uris[1:]))):
            asked = shown._replace(data_uris=uris)
            reply = await self._ask(
                Flight(request_id=f"sight{index}", prompt_ids=shown.whole_ids, params=params, shown=asked), worker
            )
            if reply.finish_reason.kind is FinishKind.ABORT:
                raise TryFailedError(Failure.UNASKED_ABORT, f"{worker.address}: aborted by the server")
            said.append((reply.token_ids, reply.logprobs))
        (ids, logprobs), (other_ids, others) = said
        if not np.array_equal(ids, other_ids) or not np.allclose(logprobs, others, rtol=0.0, atol=_SAME_LOGPROB):
            return None
        return (
            f"says the same of {shown.pictures[0].source or 'a picture'} and of noise instead, "
            f"tokens {ids.tolist()} at {logprobs.tolist()}: it does not look at the pictures that it is sent"
        )
