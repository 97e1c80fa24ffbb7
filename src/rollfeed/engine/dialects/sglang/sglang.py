"""SGLang's routes.

A prefix cache cannot be flushed under running requests: old servers (0.5.15) exit when an update tries
it, newer ones (0.5.23) say that it failed and have changed the weights. So an update either empties the servers
first (``abort``: what ran goes on afterwards from the tokens it has; newer servers do so when the update says so), or
has them put back what runs and flushes when the weights are there (``retract``), or keeps the cache unless nothing
runs (``in_place``). A pause of SGLang's mode ``abort`` is not used: it looks once a second whether it is done. A paused
server ends no request.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec
from numpy import float64
from numpy.typing import NDArray

from rollfeed.config.api_key import ApiKey
from rollfeed.config.engine import SGLangSettings, WeightUpdateMode
from rollfeed.engine.client.dialect import Context
from rollfeed.engine.client.flights import Flight, Worker
from rollfeed.engine.client.replies import Found, ServerLoad, ServerRequest
from rollfeed.engine.client.versions import version_told_by
from rollfeed.engine.dialects.sglang.replies import SGLangAnswer
from rollfeed.engine.dialects.sglang.routers import SGLangRouter, find_router
from rollfeed.engine.dialects.sglang.scoring import score_texts
from rollfeed.engine.http import json_ids
from rollfeed.errors import EngineError, EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Command, ServerUpdate
from rollfeed.types import AdapterUpdate, FolderUpdate, SamplingParams, WeightUpdate

_log = logging.getLogger(__name__)

_PATH = "/generate"
_ABORT_SECONDS = 3.0
"""For a server to confirm; the end of a step waits for it."""
_POLL_SECONDS = 0.02
_LANDING_SECONDS = 1.0
"""For the partial replies of an emptied server."""
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_ENDING_SINCE = (0, 5, 23)
_CHANGED = "Weights were updated"
"""In a refusal: of the flush, not of the weights."""
_RETRACTED = re.compile(
    rb"^sglang:num_retracted_requests_total(?:\{.*\})? (\d{1,15}(?:\.\d*)?(?:e\+\d\d)?)$", re.MULTILINE
)
_SEED_MASK = (1 << 31) - 1
_SEED_STRIDE = 0x9E3779B1
_ENCODER = msgspec.json.Encoder()
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


class SGLang:
    """Fits :class:`rollfeed.engine.client.Dialect`.

    Args:
        settings: Where the servers are, and how patient to be.
        with_text: Whether the text of a response is the server's, and not the tokenizer's of all its tokens.

    Raises:
        ConfigError: If the variable that should hold the key does not.
    """

    setting = "engine.sglang"
    is_exact = True
    untied_head = False
    aborts_by_closing = False
    repeats_ids = True
    keeps_partial = True
    is_alone = False

    def __init__(self, settings: SGLangSettings, *, with_text: bool = False) -> None:
        self.settings = settings
        self._with_text = with_text
        self.api_key = ApiKey.read(settings.api_key_env, setting=f"{self.setting}.api_key_env")
        is_retracted = settings.weight_update is WeightUpdateMode.RETRACT
        self.keeps_cache = settings.weight_update is WeightUpdateMode.IN_PLACE
        self._is_ending: dict[str, bool | None] = {}
        """Whether servers, by address, end what runs when an update says so; None where their release is not known.
        Those that do not die of it, and of a flush behind a retraction.
        """
        self._adapter: str | None = None  # that requests ask for
        self._holding = {"mode": "retract" if is_retracted else "in_place"}

    def open(self, context: Context) -> None:
        self._context = context
        self._http = context.http

    async def find_router(self) -> SGLangRouter | None:
        address = self.settings.router
        if address is None:
            return None
        router = await find_router(address, http=self._http)
        if router is None:
            raise EngineProtocolError(
                f"engine.sglang.router = {address}: answers neither /workers nor /list_workers as a router does; "
                "if it is a server, list it under engine.sglang.workers"
            )
        return router

    async def meet(self, address: str, *, is_behind_router: bool) -> Found:
        await self.health(address, timeout_seconds=self.settings.probe_timeout_seconds)
        if not is_behind_router and await find_router(address, http=self._http) is not None:
            raise EngineProtocolError(
                f"engine.sglang.workers: {address} is a router: give it as engine.sglang.router instead"
            )
        model, info = await self._model(address), await self._server_info(address)
        await self._check_context(address)
        self._is_ending[address] = _ends_requests(info)
        return Found(
            policy_version=version_told_by(address, model.get("weight_version", "default")),
            precision=_precision(info),
            takes_images=model.get("has_image_understanding") is True,
            is_exact=info.get("disable_overlap_schedule") is True,
            num_ranks=size if isinstance(size := info.get("tp_size"), int) and size > 0 else 1,
            model_path=str(model["model_path"]),
        )

    def check(self, params: SamplingParams) -> None:
        del params

    def request(self, flight: Flight, worker: Worker) -> ServerRequest:
        del worker
        most, with_mask = flight.remaining_tokens, flight.params.return_sampling_mask
        answer = SGLangAnswer(max_new_tokens=most, with_mask=with_mask, with_text=self._with_text)
        return ServerRequest(_PATH, _encoded(flight, by_version=self.keeps_cache, adapter=self._adapter), answer)

    async def health(self, address: str, *, timeout_seconds: float) -> None:
        reply = await self._http.control("GET", f"{address}/health", timeout_seconds=timeout_seconds)
        if reply.status != 200:
            raise EngineUnavailableError(f"{address}/health: HTTP {reply.status}")

    async def version(self, address: str, *, timeout_seconds: float | None = None) -> int:
        model = await self._model(address, timeout_seconds=timeout_seconds)
        return version_told_by(address, model.get("weight_version", "default"))

    async def load(self, address: str) -> ServerLoad | None:
        load = await self._load_now(address)
        if load is None or not load.waiting:
            return load  # where nothing waits nobody has to leave, however often something was put back
        told: Sequence[bytes] = ()
        with suppress(EngineError):
            told = _RETRACTED.findall((await self._http.control("GET", f"{address}/metrics")).content)
        return load._replace(total_preempted=int(sum(map(float, told))) if told else None)

    async def _load_now(self, address: str) -> ServerLoad | None:
        reply = await self._http.control("GET", f"{address}/v1/loads?include=core,queues")
        loads = reply.json().get("loads") if reply.status == 200 else None
        if not isinstance(loads, list) or not loads or not all(isinstance(each, dict) for each in loads):
            return None
        rates = [each.get("gen_throughput") for each in loads]
        # A rank whose memory is full puts requests back, whatever room the others have.
        uses = [each["token_usage"] for each in loads if each.get("token_usage") is not None]
        try:
            running = sum(int(each.get("num_running_reqs", 0)) for each in loads)
            return ServerLoad(
                running=running,
                waiting=sum(int(each.get("num_waiting_reqs", 0)) for each in loads),
                # Without --enable-metrics it is 0, whatever runs.
                tokens_per_second=None if None in rates or (running and not sum(rates)) else float(sum(rates)),
                kv_use=float(max(uses)) if uses else None,
                recompute_seconds=_recompute_seconds(loads),
                # Of the steps since it reported last, which may be over before anybody looks.
                num_preempted=sum(int((each.get("queues") or {}).get("retracted", 0)) for each in loads),
            )
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
            return None

    async def score(self, address: str, texts: Sequence[NDArray[Any]], *, policy_version: int) -> NDArray[float64]:
        seconds, adapter = self.settings.update_timeout_seconds, self._adapter
        return await score_texts(
            address, texts, policy_version=policy_version, adapter=adapter, http=self._http, timeout_seconds=seconds
        )

    async def abort(self, address: str, rid: str | None) -> None:
        body: dict[str, Any] = {"abort_all": True} if rid is None else {"rid": rid}
        await self._http.command(f"{address}/abort_request", body, timeout_seconds=_ABORT_SECONDS)

    async def hold(self, address: str) -> bool:
        await self._http.command(f"{address}/pause_generation", self._holding)
        return True

    async def release(self, address: str, *, timeout_seconds: float | None = None) -> None:
        await self._http.command(f"{address}/continue_generation", {}, timeout_seconds=timeout_seconds)

    async def update(self, worker: Worker, update: WeightUpdate, *, is_held: bool) -> int:
        address, mode = worker.address, self.settings.weight_update
        dies = mode is WeightUpdateMode.RETRACT and self._is_ending.get(address) is False
        # An adapter goes when no request uses it any more: what is held would hold it.
        if mode is WeightUpdateMode.ABORT or dies or isinstance(update, AdapterUpdate):
            return await self._update_emptied(worker, update, is_held=is_held)
        if not is_held:
            await self.hold(address)
        async with _afterwards(None if is_held else partial(self.release, address)):
            num_bytes = await self._load(address, update, empties=False)
            # Apart from the update: a server that cannot do it now says so, instead of ending. In place it can if idle.
            problem = await self._flush(address)
            if problem and mode is WeightUpdateMode.RETRACT:
                _log.warning("%s: goes on with keys and values of older weights: %s", address, problem)
        return num_bytes

    async def reload(self, worker: Worker, update: WeightUpdate) -> int:
        return await self._load(worker.address, update, empties=True)

    async def sleep(self, worker: Worker) -> None:
        await self._until_idle(worker)
        # It exits when it is to give up its memory under a request; what cannot be flushed has one.
        if problem := await self._flush(worker.address):
            raise EngineUnavailableError(f"{worker.address}: is not idle: {problem}")
        await self._commands(worker.address)("/release_memory_occupation", {})

    async def wake_up(self, address: str) -> None:
        await self._commands(address)("/resume_memory_occupation", {})

    def counts_late(self, workers: Sequence[Worker]) -> bool:
        is_in_place = self.settings.weight_update is WeightUpdateMode.IN_PLACE
        return is_in_place and not all(worker.is_exact for worker in workers)

    async def _update_emptied(self, worker: Worker, update: WeightUpdate, *, is_held: bool) -> int:
        if is_held:
            await self.release(worker.address)
        async with _afterwards(partial(self.hold, worker.address) if is_held else None):
            if not (isinstance(update, FolderUpdate) and self._is_ending.get(worker.address)):
                await self._until_idle(worker)
            return await self._load(worker.address, update, empties=True)

    def _commands(self, address: str) -> Command:
        return partial(self._http.ask, address, timeout_seconds=self.settings.update_timeout_seconds)

    async def _load(self, address: str, update: WeightUpdate, *, empties: bool) -> int:
        """Have a server load weights; with ``empties`` it ends what runs, and flushes its cache."""
        version, num_bytes = update.policy_version, 0
        command = self._commands(address)
        if isinstance(update, FolderUpdate):
            folder = {"model_path": str(update.folder_at(address)), "weight_version": str(version)}
            try:
                content = await command(
                    "/update_weights_from_disk", {**folder, "flush_cache": empties, "abort_all_requests": empties}
                )
            except EngineProtocolError as error:
                if _CHANGED in str(error):
                    raise EngineUnavailableError(f"{error}; its weights are new and their name is not") from error
                raise
            if content.get("success") is not True:
                raise EngineProtocolError(f"{address}: {content.get('message', 'no success')}")
        elif isinstance(update, ServerUpdate):
            if empties:  # an update waits for all that runs
                await self._http.command(f"{address}/abort_request", {"abort_all": True})
            num_bytes = await update.load(address, command)
            if isinstance(update, AdapterUpdate):
                self._adapter = update.adapter_name
            if empties and (problem := await self._flush(address)):
                raise EngineUnavailableError(f"{address}: its weights are new and its cache is not: {problem}")
        served = await self.version(address)
        if served != version:
            raise EngineUnavailableError(f"{address}: serves version {served} after an update to {version}")
        return num_bytes

    async def _flush(self, address: str) -> str | None:
        """Have a server forget keys and values; return why it does not."""
        reply = await self._http.control("POST", f"{address}/flush_cache")
        return None if reply.status == 200 else f"it does not flush: {reply.error}"

    async def _until_idle(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        given_up_at = loop.time() + _LANDING_SECONDS
        try:
            async with asyncio.timeout(self.settings.update_timeout_seconds):
                await self._http.command(f"{worker.address}/abort_request", {"abort_all": True})
                while worker.flights or not await self._is_idle(worker.address):
                    await asyncio.sleep(_POLL_SECONDS)
                    # What was on its way then has arrived since.
                    await self._http.command(f"{worker.address}/abort_request", {"abort_all": True})
                    if loop.time() > given_up_at:
                        for flight in tuple(worker.flights):
                            flight.interrupt()
        except TimeoutError:
            raise EngineUnavailableError(f"{worker.address}: still works on aborted requests") from None

    async def _is_idle(self, address: str) -> bool:
        load = await self._load_now(address)
        return load is None or load.running + load.waiting == 0

    async def _model(self, address: str, *, timeout_seconds: float | None = None) -> Mapping[str, Any]:
        """Return what a server says of its model."""
        url = f"{address}/model_info"
        reply = await self._http.control("GET", url, timeout_seconds=timeout_seconds)
        if reply.status == 404:
            url = f"{address}/get_model_info"  # its name on older servers
            reply = await self._http.control("GET", url, timeout_seconds=timeout_seconds)
        if reply.status >= 500:
            raise EngineUnavailableError(f"{url}: {reply.error}")
        content = reply.json()
        if reply.status != 200 or "model_path" not in content:
            raise EngineProtocolError(f"{url}: HTTP {reply.status} without a model_path: not an SGLang server")
        return content

    async def _server_info(self, address: str) -> Mapping[str, Any]:
        for path in ("/server_info", "/get_server_info"):  # the second is its name on older servers
            reply = await self._http.control("GET", address + path)
            if reply.status == 200:
                return reply.json()
        return {}

    async def _check_context(self, address: str) -> None:
        listed = (await self._http.control("GET", f"{address}/v1/models")).json().get("data")
        for each in listed if isinstance(listed, list) else ():
            limit = each.get("max_model_len") if isinstance(each, dict) else None
            if isinstance(limit, int) and self._context.context_length > limit:
                raise EngineProtocolError(
                    f"engine.context_length = {self._context.context_length}: {address} takes {limit} tokens; lower it"
                )


@asynccontextmanager
async def _afterwards(do: Callable[[], Awaitable[object]] | None) -> AsyncIterator[None]:
    """Do something when the body has ended; where that has failed, shortly, and only its own error counts."""
    try:
        yield
    except BaseException:
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_ABORT_SECONDS):
                if do is not None:
                    await do()
        raise
    if do is not None:
        await do()


def _ends_requests(told: Mapping[str, Any]) -> bool | None:
    """Whether a server ends what runs when an update says so; None where it tells no release of SGLang."""
    found = _RELEASE.match(str(told.get("version")))
    return found and tuple(map(int, found.groups())) >= _ENDING_SINCE


def _precision(told: Mapping[str, Any]) -> str:
    for name in ("precision", "quantization", "dtype"):
        value = told.get(name)
        if isinstance(value, str):
            return _PRECISIONS.get(value, value)
    return "unknown"


def _encoded(flight: Flight, *, by_version: bool, adapter: str | None) -> bytes:
    body: dict[str, Any] = {
        "rid": flight.rid,
        "input_ids": json_ids(flight.sent_ids),
        "sampling_params": _sampling_params(flight),
        "return_logprob": True,
        "stream": False,
    }
    if by_version:  # where it is not flushed: what is new shares keys and values of one version only
        body["extra_key"] = str(flight.policy_version)
    if adapter is not None:
        body["lora_path"] = adapter
    returned = ("return_sampling_mask", "return_routed_experts")
    body |= {name: True for name in returned if getattr(flight.params, name)}
    if flight.shown is not None:
        body["image_data"] = flight.shown.data_uris
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


def _recompute_seconds(loads: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean over ranks that say how long their prompts have taken, as SGLang 0.5.23 does."""
    told = [
        each["total_prefill_busy_us"] / each["total_prefill_uncached_tokens"] * each["num_used_tokens"] / 1e6
        for each in loads
        if each.get("total_prefill_uncached_tokens") and "num_used_tokens" in each
    ]
    return sum(told) / len(told) if told else None
