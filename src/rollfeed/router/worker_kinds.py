"""Kinds of workers: how each is told from the others, and asked for its weights, its load and an abort."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from rollfeed.engine.dialects.sglang.routers import find_router
from rollfeed.engine.http import Http
from rollfeed.errors import EngineError, EngineProtocolError, EngineUnavailableError

ABSENT = (404, 405, 501)
"""Statuses of routes that a worker does not have."""
_GAUGE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{[^}]*\})? ([0-9.e+-]+)$", re.M
)
_HOW = "start vLLM with VLLM_SERVER_DEV_MODE=1, on a network that you trust"


class WorkerKind(StrEnum):
    """Kinds of servers."""

    SGLANG = "sglang"
    """The embedded engine's, too."""
    VLLM = "vllm"
    """Or another one with OpenAI's routes."""


BOTH = frozenset(WorkerKind)
ROUTES: Mapping[str, frozenset[WorkerKind]] = {
    "/generate": frozenset({WorkerKind.SGLANG}),
    "/inference/v1/generate": frozenset({WorkerKind.VLLM}),
    "/v1/completions": BOTH,
    "/v1/chat/completions": BOTH,
    "/v1/responses": BOTH,
    "/v1/messages": BOTH,
    "/v1/messages/count_tokens": BOTH,
    "/v1/embeddings": BOTH,
    "/tokenize": BOTH,
    "/detokenize": BOTH,
}
"""Routes that are passed on to one worker, and the kinds that have them."""


class FoundWorker(NamedTuple):
    """A server that answers at an address."""

    kind: WorkerKind
    model: str
    num_ranks: int


class ToldWeights(NamedTuple):
    """A worker's word for its weights."""

    version_name: str | None
    """None where it keeps no name for them."""
    model_path: str | None


class ToldLoad(NamedTuple):
    """A worker's word for its load."""

    num_running: int = 0
    num_waiting: int = 0
    kv_use: float | None = None


class WorkerAsker:
    """Asks workers what routers need to know; raises EngineError where one does not answer as it should."""

    def __init__(self, http: Http, *, control_seconds: float, update_seconds: float) -> None:
        self._http = http
        self._control_seconds = control_seconds
        self._update_seconds = update_seconds

    async def meet(self, address: str, *, timeout_seconds: float) -> FoundWorker:
        """Find out what a worker is; raises EngineProtocolError for what is none."""
        await self.health(address, timeout_seconds=timeout_seconds)
        if await find_router(address, http=self._http) is not None:
            raise EngineProtocolError(f"{address}: is a router: name its workers instead")
        listed = (await self._http.control("GET", f"{address}/v1/models")).json().get("data")
        names = [str(each["id"]) for each in listed or () if isinstance(each, dict) and "id" in each]
        if (await self._model_info(address)).get("model_path"):
            info = await self._first_json(address, "/server_info", "/get_server_info")
            return FoundWorker(WorkerKind.SGLANG, names[0] if names else "unknown", _size(info.get("tp_size")))
        if not names:
            raise EngineProtocolError(f"{address}: has neither /model_info nor /v1/models: no server of a model")
        world = (await self._http.control("GET", f"{address}/get_world_size")).json()
        return FoundWorker(WorkerKind.VLLM, names[0], _size(world.get("world_size")))

    async def health(self, address: str, *, timeout_seconds: float) -> None:
        """Return when it says that it is healthy."""
        reply = await self._http.control("GET", f"{address}/health", timeout_seconds=timeout_seconds)
        if reply.status != 200 and reply.status not in ABSENT:
            raise EngineUnavailableError(f"{address}/health: {reply.error}")

    async def is_paused(self, address: str, kind: WorkerKind, *, timeout_seconds: float) -> bool:
        """Whether it says that it is held, as by a publisher of weights; such a server may answer no probe."""
        paths = ("/server_info", "/get_server_info") if kind is WorkerKind.SGLANG else ("/is_paused",)
        try:
            async with asyncio.timeout(timeout_seconds):
                return (await self._first_json(address, *paths)).get("is_paused") is True
        except (EngineError, TimeoutError):
            return False

    async def weights(self, address: str, kind: WorkerKind) -> ToldWeights:
        """Return what it says of its weights."""
        if kind is WorkerKind.SGLANG:
            info = await self._model_info(address)
            if "model_path" not in info:
                raise EngineProtocolError(f"{address}/model_info: says no model_path")
            return ToldWeights(str(info.get("weight_version", "default")), str(info["model_path"]))
        told = (await self._http.control("GET", f"{address}/weight_info")).json().get("weight_version")
        listed = (await self._http.control("GET", f"{address}/v1/models")).json().get("data")
        root = listed[0].get("root") if isinstance(listed, list) and listed and isinstance(listed[0], dict) else None
        return ToldWeights(told if isinstance(told, str) else None, root if isinstance(root, str) else None)

    async def load(self, address: str, kind: WorkerKind) -> ToldLoad:
        """Return what it says of its load; zeros where it says nothing."""
        if kind is WorkerKind.VLLM:
            reply = await self._http.control("GET", f"{address}/metrics")
            found = dict(_GAUGE.findall(reply.content.decode(errors="replace"))) if reply.status == 200 else {}
            kv_use = found.get("kv_cache_usage_perc")
            running, waiting = (float(found.get(f"num_requests_{name}", 0)) for name in ("running", "waiting"))
            return ToldLoad(int(running), int(waiting), None if kv_use is None else float(kv_use))
        told = (await self._http.control("GET", f"{address}/v1/loads?include=core")).json().get("loads")
        loads = [each for each in told or () if isinstance(each, dict)]
        uses = [each["token_usage"] for each in loads if isinstance(each.get("token_usage"), int | float)]
        running, waiting = (
            sum(_number(each.get(name)) for each in loads) for name in ("num_running_reqs", "num_waiting_reqs")
        )
        return ToldLoad(int(running), int(waiting), max(uses) if uses else None)

    async def load_folder(
        self, address: str, kind: WorkerKind, folder: str, name: str, *, more: Mapping[str, Any] | None = None
    ) -> None:
        """Have an idle worker load a folder of weights under a name, and return when it says that it serves it."""
        if kind is WorkerKind.SGLANG:
            body = {**(more or {}), "model_path": folder, "weight_version": name}
            told = await self.command(address, "/update_weights_from_disk", body)
            if told.get("success") is not True:
                raise EngineProtocolError(f"{address}: {told.get('message', 'no success')}")
        else:
            await self._load_vllm(address, folder, name)
        served = (await self.weights(address, kind)).version_name
        if served is not None and served != name:
            raise EngineUnavailableError(f"{address}: says version {served!r} after an update to {name!r}")

    async def _load_vllm(self, address: str, folder: str, name: str) -> None:
        reply = await self._http.control("POST", f"{address}/pause?mode=abort")
        if reply.status in ABSENT:
            raise EngineProtocolError(f"{address}: has no routes to change weights by: {_HOW}")
        try:
            await self.command(
                address, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            )
            if (await self.weights(address, WorkerKind.VLLM)).version_name is not None:
                await self.command(address, "/update_weight_version", {"new_version": name})
            await self.command(address, "/reset_prefix_cache?reset_running_requests=true", None)
        finally:
            await self.command(address, "/resume", None)

    async def abort(self, address: str, kind: WorkerKind, rids: Sequence[str] | None) -> bool:
        """Have a worker end requests, or with None all; return whether it can."""
        if kind is WorkerKind.VLLM:
            if rids is None:
                return False
            reply = await self._http.control("POST", f"{address}/abort_requests", {"request_ids": list(rids)})
            return reply.status == 200
        for body in [{"abort_all": True}] if rids is None else [{"rid": rid} for rid in rids]:
            await self.command(address, "/abort_request", body, timeout_seconds=self._control_seconds)
        return True

    async def command(
        self, address: str, path: str, body: Any, *, timeout_seconds: float | None = None
    ) -> Mapping[str, Any]:
        """POST and return the object of the answer, by default within the time of an update."""
        return await self._http.ask(address, path, body, timeout_seconds=timeout_seconds or self._update_seconds)

    async def _model_info(self, address: str) -> Mapping[str, Any]:
        return await self._first_json(address, "/model_info", "/get_model_info")

    async def _first_json(self, address: str, *paths: str) -> Mapping[str, Any]:
        """Return what the first of these paths says that there is; nothing where there is none."""
        for path in paths:
            reply = await self._http.control("GET", address + path)
            if reply.status == 200:
                return reply.json()
            if reply.status not in ABSENT:
                raise EngineUnavailableError(f"{address}{path}: {reply.error}")
        return {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _size(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1
