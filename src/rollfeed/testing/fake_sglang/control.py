"""Routes of a fake server that steer it or tell about it."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from rollfeed.base.serving import PROMETHEUS_TYPE, prometheus_text
from rollfeed.base.sglang_wire import RequestError, model_info, model_list
from rollfeed.testing.fake_sglang.core import ScriptedBackend, ServerCore
from rollfeed.testing.fake_sglang.faulty import Route, decoded
from rollfeed.testing.fake_sglang.http import Exchange
from rollfeed.testing.fake_sglang.settings import FakeMode, FaultKind, Release, ScriptedReply
from rollfeed.testing.fake_sglang.time_model import bound_tokens_per_second, mean_length
from rollfeed.testing.fake_sglang.wire import FakeBackend, FakeJob

_HEALTH_SECONDS = 20.0
"""After which a paused server gives up on its token."""
_ABORTING_SECONDS = 1.0
"""Between two looks of a pause at whether what it aborted has ended."""
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_MODEL = "fake-sglang"
_FORMS = (None, "flattened_bucket")


class _AbortBody(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class _UpdateBody(msgspec.Struct):
    model_path: str = ""
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class _TensorBody(msgspec.Struct):
    serialized_named_tensors: list[str]
    load_format: str | None = None
    weight_version: str | None = None


class ControlRoutes:
    """Aborting, pausing, weights, what is known of the server, and its faults."""

    def __init__(self, server: ServerCore) -> None:
        self._server = server
        self._settings = server.settings
        self._is_new = server.settings.release is Release.V0_5_23
        self._paused: str | None = None
        """The mode of the pause that there is."""
        self._load_at_pause: dict[str, Any] | None = None
        self._waiting_aborts: list[Callable[[FakeJob], bool]] = []
        self._waiting_health: set[Exchange] = set()
        self._told_version: str | None = None
        """What the model's description says while an update has not succeeded wholly."""
        self._has_session = False
        self._model_path = _MODEL
        self._started = time.time()

    @property
    def _backend(self) -> FakeBackend:
        return self._server.backend

    def routes(self) -> Mapping[tuple[str, str], Route]:
        """Return what is done at each method and path."""
        routes: dict[tuple[str, str], Route] = {
            ("POST", "/abort_request"): self._abort_request,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/update_weights_from_disk"): self._update_weights,
            ("POST", "/update_weights_from_tensor"): self._update_from_tensor,
            ("POST", "/update_weight_version"): self._update_version,
            ("POST", "/release_memory_occupation"): lambda exchange: exchange.respond_json(None),
            ("POST", "/resume_memory_occupation"): lambda exchange: exchange.respond_json(None),
            ("GET", "/flush_cache"): self._flush_cache,
            ("POST", "/flush_cache"): self._flush_cache,
            ("GET", "/health"): self._health,
            ("GET", "/health_generate"): self._health,
        }
        told: dict[str, Callable[[], Any]] = {
            "/model_info": self._described,
            "/get_model_info": self._described,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/v1/models": self._models,
            "/get_load": lambda: self._backend.usage().old_load(),
        }
        routes |= {("GET", path): partial(_tell, content) for path, content in told.items()}
        routes["GET", "/v1/loads"] = self._loads
        if self._is_new:
            routes["POST", "/begin_weight_update"] = partial(self._session, opens=True)
            routes["POST", "/end_weight_update"] = partial(self._session, opens=False)
        if self._settings.metrics:
            routes["GET", "/metrics"] = self._metrics
        return routes

    def own_routes(self) -> Mapping[tuple[str, str], Route]:
        """Return what steers the fake itself."""
        return {("GET", "/requests"): self._requests, ("POST", "/script"): self._extend_script}

    def _abort_request(self, exchange: Exchange) -> None:
        body = msgspec.json.decode(exchange.request.body, type=_AbortBody)

        def concerns(job: FakeJob) -> bool:
            rid = body.rid
            return body.abort_all or (rid is not None and (job.rid == rid or job.rid.startswith(f"{rid}_")))

        if self._paused is not None and self._is_new:
            self._waiting_aborts.append(concerns)
        elif exchange.fault is not None and exchange.fault.kind is FaultKind.SLOW_ABORT:
            self._server.later(exchange.fault.seconds or 0.0, lambda: self._backend.abort(concerns))
        else:
            self._backend.abort(concerns)
        exchange.respond(content_type=None)

    def _pause(self, exchange: Exchange) -> None:
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

    def _continue(self, exchange: Exchange) -> None:
        self._paused = self._load_at_pause = None
        aborts, self._waiting_aborts = self._waiting_aborts, []
        for concerns in aborts:
            self._backend.abort(concerns)
        self._backend.resume()
        health, self._waiting_health = self._waiting_health, set()
        for waiting in health:
            waiting.respond(content_type=None)
        exchange.respond_json({"message": "Generation continued successfully.", "status": "ok"})

    def _flush_cache(self, exchange: Exchange) -> None:
        is_refused = self._is_busy() and self._paused != "retract"
        if not is_refused:
            self._backend.flush()
        text = "Flush cache failed.\n" if is_refused else _FLUSHED
        status = 400 if is_refused else 200
        exchange.respond([text.encode()], status=status, content_type="text/plain; charset=utf-8")

    def _is_busy(self) -> bool:
        usage = self._backend.usage()
        return usage.num_running + usage.num_waiting > 0

    def _update_weights(self, exchange: Exchange) -> None:
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

    def _session(self, exchange: Exchange, *, opens: bool) -> None:
        """Open or close a session of weight updates, as new servers do: when nothing runs, or all is paused."""

        def change() -> None:
            is_wrong, self._has_session = self._has_session is opens, opens
            state = "already" if opens else "not"
            message = f"a weight-update session is {state} open" if is_wrong else "Success"
            exchange.respond_json({"success": not is_wrong, "message": message}, status=400 if is_wrong else 200)

        if self._paused is None:
            self._server.when_idle(change)
        else:
            change()

    def _update_from_tensor(self, exchange: Exchange) -> None:
        """Take a bucket for its version; a list that is empty or has no pickle, and an unknown form, are the end."""
        body = msgspec.json.decode(exchange.request.body, type=_TensorBody)
        try:
            texts = [base64.b64decode(text, validate=True) for text in body.serialized_named_tensors]
        except binascii.Error as error:
            raise RequestError(f"serialized_named_tensors: {error}") from None
        if self._is_new and not self._has_session:
            message = "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
            exchange.respond_json({"success": False, "message": message}, status=400)
        elif not texts or not all(text.startswith(b"\x80") for text in texts) or body.load_format not in _FORMS:
            self._server.die()
        else:
            self._server.set_version(body.weight_version)
            exchange.respond_json({"success": True, "message": "Success"})

    def _update_version(self, exchange: Exchange) -> None:
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

    def _health(self, exchange: Exchange) -> None:
        if self._paused is None or not self._is_new:
            exchange.respond(content_type=None)
            return
        self._waiting_health.add(exchange)

        def give_up() -> None:
            if exchange in self._waiting_health:
                self._waiting_health.discard(exchange)
                exchange.respond(status=503, content_type=None)

        self._server.later(_HEALTH_SECONDS, give_up)

    def _models(self) -> dict[str, Any]:
        started, length = int(self._started), self._settings.context_length
        return model_list(name=_MODEL, created=started, owner="sglang", context_length=length)

    def _server_info(self) -> dict[str, Any]:
        model = self._settings.time_model
        fake: dict[str, Any] = {"mode": self._settings.mode, "speed": self._settings.speed}
        if self._settings.mode is FakeMode.TIME_MODEL:
            fake["time_model"] = msgspec.to_builtins(model)
            fake["mean_length"] = mean_length(model)
            fake["bound_tokens_per_second"] = bound_tokens_per_second(model)
        return {
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

    def _loads(self, exchange: Exchange) -> None:
        timestamp = datetime.now(UTC).isoformat()
        machine = {"accelerator": "none", "num_accelerators": 1} if self._is_new else {}
        loads = [self._load_at_pause or self._load(exchange.request.query("include"))]
        exchange.respond_json({"timestamp": timestamp, "version": self._settings.release, **machine, "loads": loads})

    def _metrics(self, exchange: Exchange) -> None:
        usage = self._backend.usage()
        gauges = {
            "num_running_reqs": usage.num_running,
            "num_queue_reqs": usage.num_waiting,
            "num_used_tokens": usage.num_used_tokens,
            "token_usage": usage.num_used_tokens / usage.max_total_tokens,
            "gen_throughput": usage.tokens_per_second,
        }
        families = [GaugeMetricFamily(f"sglang:{name}", name, value) for name, value in gauges.items()]
        total = CounterMetricFamily("sglang:generation_tokens", "generation_tokens", usage.generated_tokens)
        exchange.respond([prometheus_text([*families, total])], content_type=PROMETHEUS_TYPE)

    def _requests(self, exchange: Exchange) -> None:
        exchange.respond([b"[", b",".join(self._server.kept_requests), b"]"])

    def _extend_script(self, exchange: Exchange) -> None:
        script = decoded(exchange, list[ScriptedReply] | ScriptedReply)
        if not isinstance(self._backend, ScriptedBackend):
            raise RequestError("a time model has no script")
        self._backend.extend(script)
        exchange.respond_json({"num_replies": len(script)})

    def _described(self) -> dict[str, Any]:
        new = {"served_model_name": _MODEL, "load_format": "auto", "disaggregation_mode": "null"}
        described = model_info(
            model_path=self._model_path,
            tokenizer_path=_MODEL,
            weight_version=self._told_version or self._server.weight_version,
            config={"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        )
        return {**described, **(new if self._is_new else {})}

    def _load(self, include: str | None = None) -> dict[str, Any]:
        usage = self._backend.usage()
        new = {
            "timestamp": time.time(),
            "num_active_tokens": usage.num_used_tokens,
            "num_prealloc_ready_tokens": 0,
            "total_prefill_uncached_tokens": usage.prefilled_tokens,
            "total_prefill_busy_us": round(usage.prefill_seconds * 1e6),
            "decode_moments": [0.0] * 6,
        }
        return {**(new if self._is_new else {}), **usage.load(include)}


def _tell(content: Callable[[], Any], exchange: Exchange) -> None:
    exchange.respond_json(content())


def _object(exchange: Exchange) -> dict[str, Any]:
    if not exchange.request.body.strip():
        return {}
    return msgspec.json.decode(exchange.request.body, type=dict[str, Any])
