"""A small server on a loopback port that answers as vLLM does, from a bigram model of the 26 letters."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollfeed.base.serving import serve_application
from rollfeed.config.engine import OpenAISettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import VLLM
from rollfeed.testing import END_OF_TURN, CharTokenizer
from rollfeed.types import SamplingParams
from rollfeed.weights import DiskTransport

PATIENT: dict[str, Any] = {
    "startup_timeout_seconds": 60.0,
    "request_timeout_seconds": 120.0,
    "control_timeout_seconds": 60.0,
}
LETTERS = np.arange(97, 123)
MODEL = "letters"
TOKENS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
Fault = Callable[[web.Request], Awaitable[web.StreamResponse]]


def raw_logprobs(token_id: int) -> np.ndarray:
    """Of each letter after a token."""
    logits = 3.0 * np.sin(np.arange(26) * 1.7 + token_id)
    return logits - np.log(np.exp(logits).sum())


def processed_logprobs(raw: np.ndarray, params: dict[str, Any], *, only_temperature: bool = False) -> np.ndarray:
    scaled = raw / (params["temperature"] or 1e-6)
    if params.get("top_k", -1) > 0 and not only_temperature:
        scaled = np.where(scaled >= np.sort(scaled)[-params["top_k"]], scaled, -np.inf)
    shifted = scaled - scaled.max()
    return shifted - np.log(np.exp(shifted).sum())


class FakeVLLM:
    """Speaks vLLM's routes; what is set on it before a request decides how it answers."""

    def __init__(self) -> None:
        self.routes = {TOKENS, COMPLETIONS}
        self.has_dev_routes = True
        self.ids = "token_ids"
        """How token ids are returned: ``token_ids``, ``tokens`` (as ``token_id:7``) or ``none``."""
        self.has_logprobs = True
        self.logprobs_mode = "processed"
        self.models = [{"id": MODEL, "object": "model", "max_model_len": 10_000}]
        self.key: str | None = None
        self.strict = False
        """Whether unknown fields are refused."""
        self.faults: list[Fault] = []
        """Answer the next requests for tokens instead."""
        self.hold_after: int | None = None
        """Tokens after which a response waits for :attr:`release`."""
        self.end_at: int | None = None
        """Tokens after which the end-of-turn token comes."""
        self.abort_at: int | None = None
        """Tokens after which the next stream ends without a reason, once."""
        self.release = asyncio.Event()
        self.holding = 0
        self.closed = 0
        """Requests whose client went away."""
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.calls: list[tuple[str, Any]] = []
        self.weight_version: str | None = None
        """What this vLLM calls its weights; None for one that keeps no name."""
        self.takes_names = True
        """Whether weights are called as it is told."""
        self.new_version: tuple[int, str] | None = None
        """Tokens after which a response finds the weights called otherwise, once."""
        self.update_status = 200
        self.reset_status = 200
        self.expert_file: Callable[[int], bytes] | None = None
        """Makes the file of experts of so many tokens, where it returns any."""
        self.scores_prompts = True
        """Whether ``prompt_logprobs`` are returned where they are asked for."""
        self.gauges: tuple[int, int] | None = None
        self.memory: list[tuple[str, float]] = []
        """Further metrics by name, one an engine."""
        """How many requests run and wait, by ``/metrics``; None for a server without it."""
        self.address = ""

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Of the requests for tokens after those of the probe."""
        return [body for _, body in self.requests if body.get("request_id") != "rollfeed-probe"]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        body = json.loads(content) if content else {}
        told = request.headers.get("Authorization")
        if self.key is not None and request.path.startswith("/v1") and told != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path in (TOKENS, COMPLETIONS):
            return await self._answer(request, body)
        self.calls.append((request.path_qs, body))
        if request.path == "/health":
            return web.Response()
        if request.path == "/metrics" and self.gauges is not None:
            names = zip(("num_requests_running", "num_requests_waiting"), self.gauges, strict=True)
            told = [*names, *self.memory]
            return web.Response(text="".join(f'vllm:{n}{{engine="0",model_name="m"}} {float(v)}\n' for n, v in told))
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": self.models})
        if self.has_dev_routes:
            if request.path in ("/pause", "/resume"):
                return web.json_response({"status": request.path.strip("/") + "d"})
            if request.path == "/collective_rpc":
                return web.json_response({"results": [None]}, status=self.update_status)
            if request.path == "/weight_info" and self.weight_version is not None:
                return web.json_response({"weight_version": self.weight_version})
            if request.path == "/update_weight_version" and self.weight_version is not None:
                if self.takes_names:
                    self.weight_version = body["new_version"]
                return web.json_response({"success": True, "new_version": self.weight_version})
            if request.path == "/reset_prefix_cache":
                return web.Response(status=self.reset_status)
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path not in self.routes:
            return web.json_response({"detail": "Not Found"}, status=404)
        if self.strict and "return_token_ids" in body:
            return web.json_response({"error": {"message": "Unrecognized argument: return_token_ids"}}, status=400)
        self.requests.append((request.path, body))
        if self.faults and body.get("request_id") != "rollfeed-probe":
            return await self.faults.pop(0)(request)
        is_tokens = request.path == TOKENS
        prompt = body["token_ids"] if is_tokens else body["prompt"]
        params = body["sampling_params"] if is_tokens else body
        try:
            if body.get("stream"):
                return await self._stream(request, body, prompt, params)
            tokens = list(self._sample(prompt, params))
            if self.hold_after is not None and body.get("request_id") != "rollfeed-probe":
                await self._hold()
            choice = self._choice(body, tokens, prompt, is_tokens=is_tokens, finish=self._finish(tokens, params))
            choice |= self._versions(len(tokens), is_tokens=is_tokens) | self._experts(len(prompt) + len(tokens) - 1)
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "total_tokens": 0}
            reply = {"id": "x", "choices": [choice], "usage": usage}
            if params.get("prompt_logprobs") is not None and self.scores_prompts:
                (reply if is_tokens else choice)["prompt_logprobs"] = self._scores(prompt)
            return web.json_response(reply)
        except (asyncio.CancelledError, ConnectionResetError):
            self.closed += 1
            raise

    async def _stream(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], params: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        is_probe = body.get("request_id") == "rollfeed-probe"
        tokens = list(self._sample(prompt, params))
        for number, token in enumerate(tokens):
            if number == self.hold_after and not is_probe:
                await self._hold()
            if number == self.abort_at and not is_probe:
                self.abort_at = None
                break
            is_last = number + 1 == len(tokens) and (is_probe or self.abort_at != len(tokens))
            choice = self._choice(
                body,
                [token],
                prompt if not number else None,
                is_tokens=request.path == TOKENS,
                finish=self._finish(tokens, params) if is_last else (None, None),
            )
            if is_last:
                choice |= self._versions(len(tokens), is_tokens=request.path == TOKENS)
            if is_last and request.path == TOKENS:  # streams of completions have none
                choice |= self._experts(len(prompt) + len(tokens) - 1)
            await self._send(response, {"id": "x", "choices": [choice]})
        if self.abort_at == len(tokens) and not is_probe:
            self.abort_at = None
        if body.get("stream_options"):
            usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 2}}
            await self._send(response, {"id": "x", "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _versions(self, num_tokens: int, *, is_tokens: bool) -> dict[str, Any]:
        """What the last piece of a reply on the route for tokens says besides."""
        if not is_tokens or self.weight_version is None:
            return {}
        if self.new_version is None or self.new_version[0] >= num_tokens:
            return {"weight_versions": [{"version": self.weight_version, "start": 0, "end": num_tokens}]}
        (border, name), old = self.new_version, self.weight_version
        self.weight_version, self.new_version = name, None
        spans = [{"version": old, "start": 0, "end": border}, {"version": name, "start": border, "end": num_tokens}]
        return {"weight_versions": spans}

    def _experts(self, num_tokens: int) -> dict[str, str]:
        if self.expert_file is None:
            return {}
        return {"routed_experts": base64.b64encode(self.expert_file(num_tokens)).decode()}

    async def _hold(self) -> None:
        self.holding += 1
        try:
            await self.release.wait()
        finally:
            self.holding -= 1

    @staticmethod
    async def _send(response: web.StreamResponse, chunk: Any) -> None:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _sample(self, prompt: list[int], params: dict[str, Any]) -> list[tuple[int, float]]:
        draws = np.random.default_rng(params.get("seed"))
        sampled, last = [], prompt[-1]
        for number in range(params["max_tokens"]):
            if number == self.end_at:
                sampled.append((END_OF_TURN, -0.25))
                break
            raw = raw_logprobs(last)
            processed = processed_logprobs(raw, params)
            index = int(draws.choice(26, p=np.exp(processed) / np.exp(processed).sum()))
            told = {
                "processed": processed,
                "raw": raw,
                "temperature": processed_logprobs(raw, params, only_temperature=True),
            }[self.logprobs_mode]
            last = int(LETTERS[index])
            sampled.append((last, float(told[index])))
        return sampled

    @staticmethod
    def _scores(prompt: list[int]) -> list[dict[str, Any] | None]:
        """Of a prompt of letters, as vLLM gives them for ``prompt_logprobs`` = 0."""
        return [None, *({str(b): {"logprob": raw_logprobs(a)[b - 97], "rank": 1}} for a, b in pairwise(prompt))]

    @staticmethod
    def _finish(tokens: list[tuple[int, float]], params: dict[str, Any]) -> tuple[str, int | None]:
        if tokens and tokens[-1][0] == END_OF_TURN:
            return "stop", END_OF_TURN if END_OF_TURN in params.get("stop_token_ids", ()) else None
        return "length", None

    def _choice(
        self,
        body: dict[str, Any],
        tokens: list[tuple[int, float]],
        prompt: list[int] | None,
        *,
        is_tokens: bool,
        finish: tuple[str | None, int | None],
    ) -> dict[str, Any]:
        ids = [token_id for token_id, _ in tokens]
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish[0], "logprobs": None}
        if is_tokens:
            choice["token_ids"] = ids
            if self.has_logprobs:
                content = [{"token": f"token_id:{i}", "logprob": lp, "top_logprobs": []} for i, lp in tokens]
                choice["logprobs"] = {"content": content}
            return choice
        choice |= {"text": "".join(map(chr, ids)), "stop_reason": finish[1]}
        if self.ids == "token_ids" and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        if self.has_logprobs and body.get("logprobs") is not None:
            as_ids = self.ids != "none" and body.get("return_tokens_as_token_ids")
            choice["logprobs"] = {
                "tokens": [f"token_id:{i}" if as_ids else chr(i) for i in ids],
                "token_logprobs": [logprob for _, logprob in tokens],
                "top_logprobs": [{}] * len(ids),
                "text_offset": [0] * len(ids),
            }
        return choice


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@asynccontextmanager
async def serving(handle: Fault) -> AsyncIterator[str]:
    application = web.Application(client_max_size=1 << 26)
    application.router.add_route("*", "/{path:.*}", handle)
    async with serve_application(application, host="127.0.0.1", port=0) as address:
        yield address


@pytest.fixture
def serve_handler() -> Callable[[Fault], AbstractAsyncContextManager[str]]:
    return serving


@pytest.fixture
def vllm() -> Callable[..., AbstractAsyncContextManager[FakeVLLM]]:
    """Start a server; keyword arguments are set on it."""

    @asynccontextmanager
    async def start(**changes: Any) -> AsyncIterator[FakeVLLM]:
        server = FakeVLLM()
        for name, value in changes.items():
            assert hasattr(server, name), name
            setattr(server, name, value)

        async def handle(request: web.Request) -> web.StreamResponse:
            return await server.handle(request)  # which a test may have replaced

        async with serving(handle) as address:
            server.address = address
            yield server

    return start


@pytest.fixture
def engine_at() -> Callable[..., ServerEngine]:
    def make(*servers: FakeVLLM | str, exact: bool = True, context_length: int = 1000, **changes: Any) -> ServerEngine:
        addresses = [server if isinstance(server, str) else server.address for server in servers]
        address = addresses[0] if len(addresses) == 1 else tuple(addresses)
        purpose = "training" if exact else "evaluation"
        settings = OpenAISettings(**{**PATIENT, "base_url": address, "purpose": purpose, **changes})
        folder = changes.get("weights_folder")
        return ServerEngine(
            VLLM(settings),
            context_length=context_length,
            tokenizer=CharTokenizer(),
            transport=DiskTransport(None if folder is None else Path(folder), untied_head=True),
        )

    return make


@pytest.fixture
def asked() -> Callable[..., SamplingParams]:
    def make(max_new_tokens: int = 6, **changes: Any) -> SamplingParams:
        return SamplingParams(max_new_tokens=max_new_tokens, **{"seed": 1, **changes})

    return make


@pytest.fixture
def rescored() -> Callable[..., np.ndarray]:
    """Log-probabilities of sampled letters, given what was before them."""

    def score(prompt: list[int], token_ids: list[int], **params: Any) -> np.ndarray:
        contexts = [prompt[-1], *token_ids][: len(token_ids)]
        given = {"temperature": 1.0, "top_k": -1, **params}
        return np.array(
            [
                processed_logprobs(raw_logprobs(before), given)[token_id - 97]
                for before, token_id in zip(contexts, token_ids, strict=True)
            ]
        )

    return score


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Wait for something that has no event of its own."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - see above
                await asyncio.sleep(0.005)

    return wait


@pytest.fixture
def key_variable(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ROLLFEED_TEST_KEY", "secret-7")
    return "ROLLFEED_TEST_KEY"


@pytest.fixture
def num_descriptors() -> Callable[[], int]:
    return lambda: len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))
