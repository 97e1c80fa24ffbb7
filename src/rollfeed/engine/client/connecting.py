"""Finding out, once at the start, what is behind the addresses in the settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from rollfeed.base.waiting import telling_of_waiting
from rollfeed.engine.client.dialect import Dialect
from rollfeed.engine.client.replies import Found, Router
from rollfeed.errors import EngineUnavailableError

_POLL_SECONDS = 0.2
_TOLD_AFTER_SECONDS = 5.0

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
    router = await patiently(dialect.find_router)
    addresses: Sequence[str] = dialect.settings.addresses
    if router is not None:
        addresses = await patiently(partial(_list_workers, router, setting=dialect.setting))
    meet = partial(dialect.meet, is_behind_router=router is not None)
    found = await asyncio.gather(*(patiently(partial(meet, address)) for address in addresses))
    return Servers(router, dict(zip(addresses, found, strict=True)), max(each.policy_version or 0 for each in found))


async def _patiently(ask: Callable[[], Awaitable[T]], *, seconds: float) -> T:
    """Ask until there is an answer, as long as servers may take to start."""
    last, limit = "no answer", "startup_timeout_seconds"

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
