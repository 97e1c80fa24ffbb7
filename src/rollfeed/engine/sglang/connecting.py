"""Finding out, once at the start, what is behind the addresses in the settings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from rollfeed.config.engine import SGLangSettings
from rollfeed.engine.http import Http
from rollfeed.engine.sglang.routers import Router, find_dialect
from rollfeed.engine.sglang.workers import check_health, read_model, told_version
from rollfeed.errors import EngineProtocolError, EngineUnavailableError

_POLL_SECONDS = 0.2
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}

T = TypeVar("T")


class Servers(NamedTuple):
    """What answered."""

    router: Router | None
    addresses: Sequence[str]
    """Of the workers."""
    policy_version: int
    """Of all of them."""
    precision: str
    exact: frozenset[str]
    """Addresses of those that begin no step before the last one has ended, so that they tell versions exactly."""
    takes_images: bool


async def connect(settings: SGLangSettings, *, http: Http, context_length: int) -> Servers:
    """Wait until every server is healthy, and return what they are.

    Raises:
        EngineUnavailableError: If one is not healthy in time.
        EngineProtocolError: If something else answers than what is configured, the servers differ in
            their versions, or one takes less than ``context_length`` tokens.
    """
    patiently = partial(_patiently, seconds=settings.startup_timeout_seconds)
    router = None
    addresses: Sequence[str] = settings.workers
    if settings.router is not None:
        router = await patiently(partial(_find_router, settings.router, http=http))
        addresses = await patiently(partial(_list_workers, router))
    arrive = partial(
        _arrive, http=http, timeout_seconds=settings.probe_timeout_seconds, is_behind_router=router is not None
    )
    models = await asyncio.gather(*(patiently(partial(arrive, address)) for address in addresses))
    infos = {address: await _server_info(address, http=http) for address in addresses}
    for address in addresses:
        await _check_context(address, context_length, http=http)
    return Servers(
        router=router,
        addresses=addresses,
        policy_version=_common_version(addresses, models),
        precision="+".join(sorted({_precision(info) for info in infos.values()})),
        exact=frozenset(each for each, info in infos.items() if info.get("disable_overlap_schedule") is True),
        takes_images=all(model.get("has_image_understanding") is True for model in models),
    )


async def _patiently(ask: Callable[[], Awaitable[T]], *, seconds: float) -> T:
    """Ask until there is an answer, as long as servers may take to start."""
    last = "no answer"
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await ask()
                except EngineUnavailableError as error:
                    last = str(error)
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise EngineUnavailableError(f"not there within startup_timeout_seconds = {seconds:g}: {last}") from None


async def _find_router(address: str, *, http: Http) -> Router:
    dialect = await find_dialect(address, http=http)
    if dialect is None:
        raise EngineProtocolError(
            f"engine.sglang.router = {address}: answers neither /workers nor /list_workers as a router does; "
            "if it is a server, list it under engine.sglang.workers"
        )
    return Router(address, dialect, http=http)


async def _list_workers(router: Router) -> Sequence[str]:
    addresses = tuple(await router.workers())
    if not addresses:
        raise EngineUnavailableError(f"engine.sglang.router = {router.address}: it lists no workers")
    return addresses


async def _arrive(address: str, *, http: Http, timeout_seconds: float, is_behind_router: bool) -> Mapping[str, Any]:
    await check_health(address, http=http, timeout_seconds=timeout_seconds)
    if not is_behind_router and await find_dialect(address, http=http) is not None:
        raise EngineProtocolError(
            f"engine.sglang.workers: {address} is a router: give it as engine.sglang.router instead"
        )
    return await read_model(address, http=http)


def _common_version(addresses: Sequence[str], models: Sequence[Mapping[str, Any]]) -> int:
    versions = [told_version(address, model) for address, model in zip(addresses, models, strict=True)]
    if len(set(versions)) > 1:
        told = ", ".join(f"{address} has {version}" for address, version in zip(addresses, versions, strict=True))
        raise EngineProtocolError(f"the servers are at different versions ({told}): bring them to one")
    return versions[0]


async def _server_info(address: str, *, http: Http) -> Mapping[str, Any]:
    for path in ("/server_info", "/get_server_info"):  # the second is its name on older servers
        reply = await http.control("GET", address + path)
        if reply.status == 200:
            return reply.json()
    return {}


def _precision(told: Mapping[str, Any]) -> str:
    for name in ("precision", "quantization", "dtype"):
        value = told.get(name)
        if isinstance(value, str):
            return _PRECISIONS.get(value, value)
    return "unknown"


async def _check_context(address: str, context_length: int, *, http: Http) -> None:
    listed = (await http.control("GET", f"{address}/v1/models")).json().get("data")
    for each in listed if isinstance(listed, list) else ():
        limit = each.get("max_model_len") if isinstance(each, dict) else None
        if isinstance(limit, int) and context_length > limit:
            raise EngineProtocolError(
                f"engine.context_length = {context_length}: {address} takes {limit} tokens; lower it"
            )
