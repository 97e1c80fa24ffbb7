"""Endpoints that steer the engine or tell about it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from typing import Any

import numpy as np
from aiohttp import web

from rollfeed.base.serving import PROMETHEUS_TYPE, prometheus_text
from rollfeed.base.sglang_wire import RequestError, model_info, new_request_id
from rollfeed.engine.http.json_answers import json_reply, read_json
from rollfeed.engine.server.service import ServerJob, Service
from rollfeed.errors import CheckpointError, EngineProtocolError
from rollfeed.types import SamplingParams

_HEALTH_TIMEOUT_SECONDS = 20.0
_DEFAULT_TRUNCATE_SIZE = 100


class ControlHandlers:
    """Aborting, pausing, weights, and what is known of the server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        """Return the endpoints."""
        return [
            web.post("/abort_request", self.abort_request),
            web.post("/pause_generation", self.pause_generation),
            web.post("/continue_generation", self.continue_generation),
            *(route("/flush_cache", self.flush_cache) for route in (web.get, web.post)),
            web.post("/update_weights_from_disk", self.update_weights_from_disk),
            web.post("/update_weight_version", self.update_weight_version),
            *(route("/get_weights_by_name", self.get_weights_by_name) for route in (web.get, web.post)),
            web.get("/health", self.health),
            web.get("/health_generate", self.health_generate),
            web.get("/get_model_info", self.model_info),
            web.get("/model_info", self.model_info),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/v1/loads", self.loads),
            web.get("/get_load", self.get_load),
            web.get("/metrics", self.metrics),
        ]

    async def abort_request(self, request: web.Request) -> web.Response:
        """Abort one request or all; unknown ids are fine."""
        body = await read_json(request)
        if _flag(body, "abort_all", default=False):
            await self._service.abort(None)
        elif _text(body, "rid") is not None:
            await self._service.abort(body["rid"])
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        """Hold, with what runs aborted, put back or left where it is."""
        body = await read_json(request, optional=True)
        await self._service.to_the_end(self._service.pause(_text(body, "mode") or "abort"))
        return await json_reply({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        """Go on."""
        await read_json(request, optional=True)
        await self._service.to_the_end(self._service.resume())
        return await json_reply({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, _request: web.Request) -> web.Response:
        """Forget all prefixes that could be shared."""
        await self._service.to_the_end(self._service.flush_cache())
        return web.Response(text="Cache flushed.\n")

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        """Replace the weights, all or none."""
        body = await read_json(request)
        model_path = _text(body, "model_path")
        if not model_path:
            raise RequestError("model_path is missing: give the folder with the new *.safetensors")
        # Shared prefixes are always flushed, and what runs always keeps its own keys and values.
        _flag(body, "flush_cache", default=True)
        action = self._service.update_from_disk(
            model_path, _text(body, "weight_version"), abort_running=_flag(body, "abort_all_requests", default=False)
        )
        try:
            await self._service.to_the_end(action)
        except (CheckpointError, EngineProtocolError) as error:
            message = f"Failed to update weights: {error}"
            return await json_reply({"success": False, "message": message, "num_paused_requests": 0}, status=400)
        return await json_reply(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def update_weight_version(self, request: web.Request) -> web.Response:
        """Rename the weights that are served."""
        body = await read_json(request)
        version = _text(body, "new_version")
        if not version:
            raise RequestError("new_version is missing: give a string")
        abort_running = _flag(body, "abort_all_requests", default=True)
        await self._service.to_the_end(self._service.set_version(version, abort_running=abort_running))
        message = f"Weight version updated to {version}"
        return await json_reply({"success": True, "message": message, "new_version": version})

    async def get_weights_by_name(self, request: web.Request) -> web.Response:
        """Return the first rows of a weight."""
        body = await read_json(request)
        size = body.get("truncate_size", _DEFAULT_TRUNCATE_SIZE)
        if type(size) is not int or not 0 <= size < 2**31:
            raise RequestError("truncate_size must be an integer of at least 0 and below 2^31")
        rows = await self._service.engine.read_weight(_text(body, "name") or "", num_rows=size)
        return await json_reply(
            rows, num_tokens=len(rows) * (len(rows[0]) if rows and isinstance(rows[0], list) else 1)
        )

    async def health(self, _request: web.Request) -> web.Response:
        """Answer when the engine's thread is there."""
        await self._service.engine.health()
        return web.Response()

    async def health_generate(self, _request: web.Request) -> web.Response:
        """Answer when a token has been made."""
        job = ServerJob(
            request_id=f"health_{new_request_id()}",
            token_ids=np.zeros(1, np.int32),
            params=SamplingParams(max_new_tokens=1, temperature=0.0),
        )
        await self._service.check_health(job, timeout_seconds=_HEALTH_TIMEOUT_SECONDS)
        return web.Response()

    async def model_info(self, _request: web.Request) -> web.Response:
        """Describe the model."""
        return await json_reply(self._model_info())

    async def server_info(self, _request: web.Request) -> web.Response:
        """Describe the model, the limits and the load."""
        engine = self._service.engine
        return await json_reply(
            {
                **self._model_info(),
                "served_model_name": self._service.model.name,
                "context_length": engine.context_length,
                "max_running_requests": engine.max_running_requests,
                "max_queued_requests": self._service.model.max_waiting,
                "max_total_num_tokens": engine.max_running_requests * engine.context_length,
                "precision": engine.precision,
                "is_paused": self._service.is_paused,
                "disable_overlap_schedule": True,
                "tp_size": 1,
                "dp_size": 1,
                "version": _VERSION,
                "internal_states": [self._service.usage().load()],
            }
        )

    async def loads(self, request: web.Request) -> web.Response:
        """Return how busy the engine is."""
        load = self._service.usage().load(request.query.get("include"))
        return await json_reply({"timestamp": datetime.now(UTC).isoformat(), "version": _VERSION, "loads": [load]})

    async def get_load(self, _request: web.Request) -> web.Response:
        """Return how busy the engine is, in the older form."""
        return await json_reply(self._service.usage().old_load())

    async def metrics(self, _request: web.Request) -> web.Response:
        """Return counters for Prometheus."""
        service = self._service
        families = service.counters.families(service.usage())
        return web.Response(body=prometheus_text(families), headers={"Content-Type": PROMETHEUS_TYPE})

    def _model_info(self) -> dict[str, Any]:
        service = self._service
        return model_info(
            model_path=service.model_path,
            tokenizer_path=service.model.model_path,
            weight_version=service.weight_version,
            config=service.model.config,
            takes_pictures=service.picture_input is not None,
        )


def _version() -> str:
    try:
        return f"rollfeed {package_version('rollfeed')}"  # numbers alone would be a release of SGLang
    except PackageNotFoundError:  # run from its source folder
        return "rollfeed"


_VERSION = _version()


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name} must be a string")
    return value


def _flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false")
    return default if value is None else value
