"""Routes of a fake server that steer it or tell about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from rollfeed.errors import ConfigError
from rollfeed.testing.fake_sglang.faults import FaultKind, ServerFault
from rollfeed.testing.fake_sglang.http import Exchange
from rollfeed.testing.fake_sglang.scripted import ScriptedBackend
from rollfeed.testing.fake_sglang.settings import FakeMode, Release, ScriptedReply
from rollfeed.testing.fake_sglang.time_model import bound_tokens_per_second, mean_length
from rollfeed.testing.fake_sglang.wire import Backend, Job, RequestError

if TYPE_CHECKING:
    from rollfeed.testing.fake_sglang.server import FakeServer

Route: TypeAlias = Callable[[Exchange, ServerFault | None], object]

CONTROL_PATHS = ("/fault", "/script", "/stats", "/requests")
"""Of the fake itself; no fault meets them."""
_HEALTH_SECONDS = 20.0
"""After which a paused server gives up on its token."""
_ABORTING_SECONDS = 1.0
"""Between two looks of a pause at whether what it aborted has ended."""
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_MODEL = "fake-sglang"


class _AbortBody(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class _UpdateBody(msgspec.Struct):
    model_path: str = ""
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class ControlRoutes:
    """Aborting, pausing, weights, what is known of the server, and its faults."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._settings = server.settings
        self._is_new = server.settings.release is Release.V0_5_23
        self._paused: str | None = None
        """The mode of the pause that there is."""
        self._load_at_pause: dict[str, Any] | None = None
        self._waiting_aborts: list[Callable[[Job], bool]] = []
        self._waiting_health: set[Exchange] = set()
        self._told_version: str | None = None
        """What the model's description says while an update has not succeeded wholly."""
        self._model_path = _MODEL
        self._started = time.time()

    @property
    def _backend(self) -> Backend:
        return self._server.backend

    def routes(self) -> Mapping[tuple[str, str], Route]:
        """Return what is done at each method and path."""
        routes: dict[tuple[str, str], Route] = {
            ("POST", "/abort_request"): self._abort_request,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/update_weights_from_disk"): self._update_weights,
            ("POST", "/update_weight_version"): self._update_version,
            ("POST", "/release_memory_occupation"): self._nothing,
            ("POST", "/resume_memory_occupation"): self._nothing,
            ("GET", "/health"): self._health,
            ("GET", "/health_generate"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/v1/loads"): self._loads,
            ("GET", "/get_load"): self._get_load,
            ("GET", "/stats"): self._stats,
            ("GET", "/requests"): self._requests,
            ("GET", "/fault"): self._list_faults,
            ("POST", "/fault"): self._add_faults,
            ("DELETE", "/fault"): self._clear_faults,
            ("POST", "/script"): self._extend_script,
        }
        for method in ("GET", "POST"):
            routes[method, "/flush_cache"] = self._flush_cache
        for path in ("/model_info", "/get_model_info"):
            routes["GET", path] = self._model_info
        for path in ("/server_info", "/get_server_info"):
            routes["GET", path] = self._server_info
        if self._settings.metrics:
            routes["GET", "/metrics"] = self._metrics
        return routes

    def _abort_request(self, exchange: Exchange, fault: ServerFault | None) -> None:
        body = msgspec.json.decode(exchange.request.body, type=_AbortBody)

        def concerns(job: Job) -> bool:
            rid = body.rid
            return body.abort_all or (rid is not None and (job.rid == rid or job.rid.startswith(f"{rid}_")))

        if self._paused is not None and self._is_new:
            self._waiting_aborts.append(concerns)
        elif fault is not None and fault.kind is FaultKind.SLOW_ABORT:
            self._server.later(fault.seconds or 0.0, lambda: self._backend.abort(concerns))
        else:
            self._backend.abort(concerns)
        exchange.respond(content_type=None)

    def _pause(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        mode = _object(exchange).get("mode") or "abort"
        if mode not in ("abort", "retract", "in_place"):
            raise RequestError(f"mode must be abort, retract or in_place, got {mode!r}")
        if mode == "abort":
            seconds = _ABORTING_SECONDS / self._settings.speed if self._is_busy() else 0.0
            self._backend.pause(mode)
            self._load_at_pause = self._load()
        else:
            seconds = 0.0
            self._load_at_pause = self._load()
            self._backend.pause(mode)
        self._paused = mode
        answer = {"message": "Generation paused successfully.", "status": "ok"}
        if seconds > 0.0 and self._is_new:
            self._server.later(seconds, lambda: exchange.respond_json(answer))
        else:
            exchange.respond_json(answer)

    def _continue(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        self._paused = self._load_at_pause = None
        aborts, self._waiting_aborts = self._waiting_aborts, []
        for concerns in aborts:
            self._backend.abort(concerns)
        self._backend.resume()
        health, self._waiting_health = self._waiting_health, set()
        for waiting in health:
            waiting.respond(content_type=None)
        exchange.respond_json({"message": "Generation continued successfully.", "status": "ok"})

    def _flush_cache(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        is_refused = self._is_busy() and self._paused != "retract"
        if not is_refused:
            self._backend.flush()
        text = "Flush cache failed.\n" if is_refused else _FLUSHED
        status = 400 if is_refused else 200
        exchange.respond([text.encode()], status=status, content_type="text/plain; charset=utf-8")

    def _is_busy(self) -> bool:
        usage = self._backend.usage()
        return usage.num_running + usage.num_waiting > 0

    def _update_weights(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        body = msgspec.json.decode(exchange.request.body, type=_UpdateBody)
        if not body.model_path:
            raise RequestError("model_path is missing")
        if body.abort_all_requests:
            self._backend.abort(lambda _: True)
        if not self._is_new and self._is_busy() and body.flush_cache:
            self._server.die()
        elif self._is_new and self._paused is None:
            self._server.when_idle(lambda: self._load_weights(exchange, body))
        else:
            self._load_weights(exchange, body)

    def _load_weights(self, exchange: Exchange, body: _UpdateBody) -> None:
        is_kept = body.flush_cache and self._is_busy() and self._paused == "in_place"
        if body.flush_cache and not is_kept:
            self._backend.flush()
        self._backend.stall(self._settings.update_seconds)

        def finish() -> None:
            self._model_path = body.model_path
            self._told_version = self._described()["weight_version"] if is_kept else None
            self._server.set_version(body.weight_version)
            message = "Succeeded to update model weights."
            if body.weight_version is not None:
                message += f" Weight version updated to {body.weight_version}."
            if is_kept:
                message = (
                    "Weights were updated, but the cache was not flushed because requests are still running or queued."
                    " Retract or finish them, then call /flush_cache."
                )
            status = 400 if is_kept else 200
            reply = {"success": not is_kept, "message": message, "num_paused_requests": 0}
            exchange.respond_json(reply, status=status)

        if self._settings.update_seconds > 0.0:
            self._server.later(self._settings.update_seconds / self._settings.speed, finish)
        else:
            finish()

    def _update_version(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        body = _object(exchange)
        version = body.get("new_version")
        if not isinstance(version, str) or not version:
            raise RequestError("new_version is missing: give a string")
        is_aborting = body.get("abort_all_requests", True)
        self._server.set_version(version, num_late=int(is_aborting))
        if is_aborting:
            self._backend.abort(lambda _: True)
        message = f"Weight version updated to {version}"
        exchange.respond_json({"success": True, "message": message, "new_version": version})

    def _health(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        if self._paused is None or not self._is_new:
            exchange.respond(content_type=None)
            return
        self._waiting_health.add(exchange)

        def give_up() -> None:
            if exchange in self._waiting_health:
                self._waiting_health.discard(exchange)
                exchange.respond(status=503, content_type=None)

        self._server.later(_HEALTH_SECONDS, give_up)

    def _model_info(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        exchange.respond_json(self._described())

    def _models(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        model = {"id": _MODEL, "object": "model", "created": int(self._started), "owned_by": "sglang", "root": _MODEL}
        model["max_model_len"] = self._settings.context_length
        exchange.respond_json({"object": "list", "data": [model]})

    def _server_info(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        model = self._settings.time_model
        fake: dict[str, Any] = {"mode": self._settings.mode, "speed": self._settings.speed}
        if self._settings.mode is FakeMode.TIME_MODEL:
            fake["time_model"] = msgspec.to_builtins(model)
            fake["mean_length"] = mean_length(model)
            fake["bound_tokens_per_second"] = bound_tokens_per_second(model)
        exchange.respond_json(
            {
                **self._described(),
                "served_model_name": _MODEL,
                "context_length": self._settings.context_length,
                "is_paused": self._paused is not None,
                "disable_overlap_schedule": False,
                "tp_size": 1,
                "dp_size": 1,
                "version": self._settings.release,
                "internal_states": [self._load()],
                "fake": fake,
            }
        )

    def _loads(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        timestamp = datetime.now(UTC).isoformat()
        machine = {"accelerator": "none", "num_accelerators": 1} if self._is_new else {}
        exchange.respond_json(
            {
                "timestamp": timestamp,
                "version": self._settings.release,
                **machine,
                "loads": [self._load_at_pause or self._load()],
            }
        )

    def _get_load(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        usage = self._backend.usage()
        load = {
            "dp_rank": 0,
            "num_reqs": usage.num_running + usage.num_waiting,
            "num_waiting_reqs": usage.num_waiting,
            "num_tokens": usage.num_used_tokens,
        }
        exchange.respond_json([load])

    def _metrics(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        usage = self._backend.usage()
        gauges = {
            "num_running_reqs": usage.num_running,
            "num_queue_reqs": usage.num_waiting,
            "num_used_tokens": usage.num_used_tokens,
            "token_usage": usage.num_used_tokens / usage.max_total_tokens,
            "gen_throughput": usage.tokens_per_second,
        }
        lines = [f"# TYPE sglang:{name} gauge\nsglang:{name} {value}\n" for name, value in gauges.items()]
        total = usage.generated_tokens
        lines.append(f"# TYPE sglang:generation_tokens_total counter\nsglang:generation_tokens_total {total}\n")
        exchange.respond(["".join(lines).encode()], content_type="text/plain; version=0.0.4; charset=utf-8")

    def _nothing(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        exchange.respond_json(None)

    def _stats(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        exchange.respond_json(self._server.stats())

    def _requests(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        exchange.respond([b"[", b",".join(self._server.kept_requests), b"]"])

    def _list_faults(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        exchange.respond_json(self._server.faults.in_force())

    def _add_faults(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        faults = _decoded(exchange, list[ServerFault] | ServerFault)
        # Answered first: a server that stops listening drops those that wait for an answer.
        exchange.respond_json(faults)
        for fault in faults:
            self._server.add_fault(fault)

    def _clear_faults(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        self._server.faults.clear()
        exchange.respond_json([])

    def _extend_script(self, exchange: Exchange, _fault: ServerFault | None) -> None:
        script = _decoded(exchange, list[ScriptedReply] | ScriptedReply)
        if not isinstance(self._backend, ScriptedBackend):
            raise RequestError("a time model has no script")
        self._backend.extend(script)
        exchange.respond_json({"num_replies": len(script)})

    def _described(self) -> dict[str, Any]:
        new = {"served_model_name": _MODEL, "load_format": "auto", "disaggregation_mode": "null"}
        return {
            "model_path": self._model_path,
            "tokenizer_path": _MODEL,
            **(new if self._is_new else {}),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self._told_version or self._server.weight_version,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
        }

    def _load(self) -> dict[str, Any]:
        usage = self._backend.usage()
        new = {
            "timestamp": time.time(),
            "num_active_tokens": usage.num_used_tokens,
            "num_prealloc_ready_tokens": 0,
            "total_prefill_uncached_tokens": 0,
            "total_prefill_busy_us": 0,
            "decode_moments": [0.0] * 6,
        }
        return {
            **(new if self._is_new else {}),
            "dp_rank": 0,
            "num_running_reqs": usage.num_running,
            "num_waiting_reqs": usage.num_waiting,
            "num_waiting_uncached_tokens": usage.num_uncached_tokens,
            "num_used_tokens": usage.num_used_tokens,
            "num_total_tokens": usage.num_used_tokens + usage.num_uncached_tokens,
            "max_total_num_tokens": usage.max_total_tokens,
            "max_running_requests": usage.max_running,
            "token_usage": usage.num_used_tokens / usage.max_total_tokens,
            "gen_throughput": usage.tokens_per_second,
            "cache_hit_rate": 0.0,
            "utilization": usage.num_running / usage.max_running,
        }


def _object(exchange: Exchange) -> dict[str, Any]:
    if not exchange.request.body.strip():
        return {}
    return msgspec.json.decode(exchange.request.body, type=dict[str, Any])


def _decoded(exchange: Exchange, kind: Any) -> list[Any]:
    """Return one or several things of a body as a list."""
    try:
        content = msgspec.json.decode(exchange.request.body, type=kind)
    except ConfigError as error:
        raise RequestError(str(error)) from error
    return content if isinstance(content, list) else [content]
