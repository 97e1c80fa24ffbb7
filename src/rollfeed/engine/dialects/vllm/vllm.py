"""vLLM's routes, and what of them other OpenAI-style servers have.

vLLM changes weights with ``VLLM_SERVER_DEV_MODE=1``: ``/pause``, ``/resume``, ``/reset_prefix_cache``, and
``/collective_rpc``, by which every worker of it is told to reload its weights from a folder. Newer ones (0.32)
keep a name for their version: ``/update_weight_version`` sets it, ``/weight_info`` tells it, and the replies of the
route for tokens say which token saw which. By it a server is known that was started again, with its first weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from numpy import float64
from numpy.typing import NDArray

from rollfeed.config.api_key import ApiKey
from rollfeed.config.engine import OpenAISettings, Purpose
from rollfeed.engine.client.dialect import Context
from rollfeed.engine.client.flights import Flight, Worker
from rollfeed.engine.client.replies import Found, ServerLoad, ServerRequest
from rollfeed.engine.client.versions import version_told_by
from rollfeed.engine.client.workers import empty
from rollfeed.engine.dialects.vllm.probing import ABSENT, Server, check_health, probe
from rollfeed.engine.dialects.vllm.replies import VLLMAnswer
from rollfeed.engine.dialects.vllm.requests import Route, encode_request
from rollfeed.engine.dialects.vllm.scoring import score_texts
from rollfeed.errors import EngineError, EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Command, ServerUpdate
from rollfeed.types import AdapterUpdate, FolderUpdate, SamplingParams, WeightUpdate

_HOW = "start vLLM with VLLM_SERVER_DEV_MODE=1, which offers them on a network that you trust"
_METRIC = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc|num_preemptions_total)"
    r"(?:\{[^}]*\})? (\d{1,15}(?:\.\d*)?(?:e[+-]\d\d)?)$",
    re.MULTILINE,
)
"""One line an engine of the server; ``gpu_cache_usage_perc`` is the name in versions before 0.11."""


class VLLM:
    """Fits :class:`rollfeed.engine.client.Dialect`.

    To train on what servers sample, their replies must have the sampled token ids and their logprobs: each is asked for
    a few tokens at the start. For evaluation text will do; it is tokenised here, and its logprobs are NaN.

    Raises:
        ConfigError: If the variable that should hold the key does not.
    """

    setting = "engine.openai"
    untied_head = True
    aborts_by_closing = True
    repeats_ids = False
    is_alone = True
    keeps_cache = False

    def __init__(self, settings: OpenAISettings) -> None:
        self.settings = settings
        self.api_key = ApiKey.read(settings.api_key_env, setting=f"{self.setting}.api_key_env")
        self.is_exact = settings.purpose is Purpose.TRAINING
        self.keeps_partial = settings.stream and self.is_exact  # only from exact tokens can a response go on
        self._servers: dict[str, Server] = {}

    def open(self, context: Context) -> None:
        self._context = context
        self._http = context.http

    async def find_router(self) -> None:
        return None

    async def meet(self, address: str, *, is_behind_router: bool) -> Found:
        del is_behind_router
        await self.health(address, timeout_seconds=self.settings.control_timeout_seconds)
        server = await probe(address, settings=self.settings, context=self._context)
        told = await self.version(address)
        self._servers[address] = server._replace(names_versions=told is not None)
        size = (await self._http.control("GET", f"{address}/get_world_size")).json().get("world_size")
        return Found(
            policy_version=server.policy_version if told is None else told,
            # The other routes take none beside tokens; whether its model takes any shows when it is sent one.
            takes_images=server.route is Route.TOKENS,
            num_ranks=size if isinstance(size, int) and size > 0 else 1,
        )

    def check(self, params: SamplingParams) -> None:
        for address, server in self._servers.items():
            hidden = server.logprobs_of.hides(params) if self.is_exact else None
            if hidden is not None:
                raise EngineProtocolError(
                    f"{address}: its logprobs are of {server.logprobs_of.value} and do not show "
                    f"{hidden} = {getattr(params, hidden)}: start vLLM with --logprobs-mode processed_logprobs"
                )
            if params.return_routed_experts and not server.returns_experts:
                raise EngineProtocolError(
                    f"{address}: {server.route.path} returns no routed_experts, which sampling.return_routed_experts "
                    "asks for: start vLLM (0.32 or later) with --enable-return-routed-experts and --enable-scale-out"
                )

    def request(self, flight: Flight, worker: Worker) -> ServerRequest:
        server = self._servers[worker.address]
        body = encode_request(flight, route=server.route, model=server.model, stream=self.settings.stream)
        answer = VLLMAnswer(
            prompt_ids=flight.input_ids,
            max_new_tokens=flight.remaining_tokens,
            exact=self.is_exact,
            with_experts=flight.params.return_routed_experts,
            lacks=server.lacks,
            tokenizer=self._context.tokenizer,
        )
        return ServerRequest(server.route.path, body, answer)

    async def health(self, address: str, *, timeout_seconds: float) -> None:
        await check_health(address, http=self._http, timeout_seconds=timeout_seconds)

    async def version(self, address: str, *, timeout_seconds: float | None = None) -> int | None:
        url = f"{address}/weight_info"
        reply = await self._http.control("GET", url, timeout_seconds=timeout_seconds)
        if reply.status >= 500 and reply.status not in ABSENT:
            raise EngineUnavailableError(f"{url}: {reply.error}")
        told = reply.json().get("weight_version") if reply.status == 200 else None
        return version_told_by(url, told) if isinstance(told, str) else None

    async def load(self, address: str) -> ServerLoad | None:
        reply = await self._http.control("GET", f"{address}/metrics")
        if reply.status != 200:
            return None
        told: dict[str, list[float]] = {}
        for name, value in _METRIC.findall(reply.content.decode(errors="replace")):
            told.setdefault(name, []).append(float(value))
        if not told:
            return None
        uses = told.get("kv_cache_usage_perc") or told.get("gpu_cache_usage_perc")
        return ServerLoad(
            running=int(sum(told.get("num_requests_running", ()))),
            waiting=int(sum(told.get("num_requests_waiting", ()))),
            kv_use=max(uses) if uses else None,
            total_preempted=int(sum(totals)) if (totals := told.get("num_preemptions_total")) else None,
        )

    async def score(
        self, address: str, texts: Sequence[NDArray[Any]], *, policy_version: int
    ) -> NDArray[float64] | None:
        del policy_version
        seconds = self.settings.update_timeout_seconds
        return await score_texts(address, self._servers[address], texts, http=self._http, timeout_seconds=seconds)

    async def abort(self, address: str, rid: str | None) -> None:
        """Do nothing: a closed connection says it."""

    async def hold(self, address: str) -> bool:
        return await self._offers(f"{address}/pause?mode=keep")

    async def release(self, address: str, *, timeout_seconds: float | None = None) -> None:
        await self._offers(f"{address}/resume", timeout_seconds=timeout_seconds)

    async def update(self, worker: Worker, update: WeightUpdate, *, is_held: bool) -> int:
        address = worker.address
        await empty(worker, seconds=self.settings.control_timeout_seconds)
        if not await self._offers(f"{address}/pause?mode=abort"):
            raise EngineProtocolError(f"{address}: has no routes to change weights by: {_HOW}")
        try:
            return await self._load(address, update)
        finally:
            if not is_held:
                await self._http.command(f"{address}/resume", None)

    async def reload(self, worker: Worker, update: WeightUpdate) -> int:
        return await self.update(worker, update, is_held=False)

    async def sleep(self, worker: Worker) -> None:
        address, seconds = worker.address, self.settings.update_timeout_seconds
        await empty(worker, seconds=self.settings.control_timeout_seconds)
        if not await self._offers(f"{address}/sleep?level=1", timeout_seconds=seconds):
            raise EngineProtocolError(f"{address}: cannot give up its memory: {_HOW}, and --enable-sleep-mode")

    async def wake_up(self, address: str) -> None:
        await self._offers(f"{address}/wake_up", timeout_seconds=self.settings.update_timeout_seconds)

    def counts_late(self, workers: Sequence[Worker]) -> bool:
        del workers
        return False

    def _commands(self, address: str) -> Command:
        return partial(self._http.ask, address, timeout_seconds=self.settings.update_timeout_seconds)

    async def _load(self, address: str, update: WeightUpdate) -> int:
        command = self._commands(address)
        has_loaded, num_bytes = False, 0
        try:
            if isinstance(update, FolderUpdate):
                reload = {"method": "reload_weights", "kwargs": {"weights_path": str(update.folder_at(address))}}
                await command("/collective_rpc", reload)
            elif isinstance(update, ServerUpdate):
                num_bytes = await update.load(address, command)
            has_loaded = True
            if isinstance(update, AdapterUpdate):  # it goes by the name of a model
                self._servers[address] = self._servers[address]._replace(model=update.adapter_name)
            if self._servers[address].names_versions:
                await command("/update_weight_version", {"new_version": str(update.policy_version)})
                if (served := await self.version(address)) != update.policy_version:
                    raise EngineProtocolError(f"serves version {served} after an update to {update.policy_version}")
            # Without the parameter a server answers 200 and keeps its cache while anybody's request uses it.
            await command("/reset_prefix_cache?reset_running_requests=true", None)
        except EngineError as error:
            if has_loaded or not isinstance(error, EngineProtocolError):
                raise EngineUnavailableError(
                    f"{address}: its weights are not known since an update failed: {error}"
                ) from error
            raise
        return num_bytes

    async def _offers(self, url: str, *, timeout_seconds: float | None = None) -> bool:
        """POST to a route, and return whether there is one."""
        reply = await self._http.control("POST", url, timeout_seconds=timeout_seconds)
        if reply.status in ABSENT:
            return False
        if reply.status != 200:
            raise EngineUnavailableError(f"{url}: {reply.error}")
        return True
