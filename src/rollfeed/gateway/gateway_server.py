"""The gateway over HTTP: what agents ask, in the APIs that they speak, and what operators do with sessions.

Agents: the endpoints of OpenAI and Anthropic, below ``/s/<key>`` or with the session's key as API key. Operators:
``POST /sessions``, ``GET`` and ``DELETE /sessions/<id>``, ``POST /sessions/<id>/finish``, ``GET /metrics``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec
from aiohttp import web

from rollfeed.base.serving import CLOSED_CONNECTIONS, PROMETHEUS_TYPE, decoded_body, is_key, key_of, prometheus_text
from rollfeed.chat_apis import CHAT_APIS, AnthropicMessages, ApiError, ChatApi, ErrorKind, OpenAIChat, stream_of
from rollfeed.gateway.replies import AgentReply, AgentRequest
from rollfeed.gateway.session import Session, SessionAbortedError
from rollfeed.gateway.sessions import OpenSession, Sessions
from rollfeed.gateway.totals import families

logger = logging.getLogger(__name__)

_ANTHROPIC, _OPENAI = AnthropicMessages(), OpenAIChat()
_OPEN_SECONDS = 0.5
"""After which a stream is opened although nothing is there yet: until then an error has a status of its own."""
_PING_SECONDS = 10.0
_WRITING_SECONDS = 120.0
"""For each piece of a reply to be taken."""
_LARGE_BYTES = 1 << 20
"""Of a body that is decoded in a thread."""
_SMALL_BYTES = 1 << 15
"""Of a piece that fits into what the system keeps for a client."""
_CLIENT_LEFT = 499
_MOST_INTEGER = 1 << 63
_encoder = msgspec.json.Encoder()

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GatewayServer:
    """Answers agents and operators.

    ``token`` is the operators'; empty where the address is enough. Agents reach it under the address under which the
    opener of a session did. A body has ``reading_seconds`` to come.
    """

    def __init__(self, sessions: Sessions, *, token: str = "", reading_seconds: float = 120.0) -> None:
        self._sessions = sessions
        self._token = token
        self._reading_seconds = reading_seconds
        self._body_bytes: dict[str, int] = {}
        """That each session has on the way."""

    def application(self, *, for_operators: bool = True) -> web.Application:
        application = web.Application(client_max_size=self._sessions.caps.max_body_bytes, middlewares=[self._errors])
        application[CLOSED_CONNECTIONS] = self._sessions.totals.counts
        for prefix in ("", "/s/{key}"):
            application.router.add_post(prefix + _ANTHROPIC.count_path, self._count_tokens)
            for api in CHAT_APIS.values():
                application.router.add_post(prefix + api.path, partial(self._turn, api))
        application.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/s/{key}/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/healthz", self._health),
                web.get("/metrics", self._metrics),
            ]
        )
        if for_operators:
            application.add_routes(
                [
                    web.post("/sessions", self._open),
                    web.get("/sessions/{id}", self._show),
                    web.delete("/sessions/{id}", self._drop),
                    web.post("/sessions/{id}/finish", self._finish),
                ]
            )
        return application

    async def _turn(self, api: ChatApi, request: web.Request) -> web.StreamResponse:
        session = self._sessions.of_key(_key_of(request))
        body = await self._read(request, session)
        asked = api.read(await _decoded(body))
        asked = asked if asked.model else replace(asked, model=self._sessions.policy.models[0])
        if asked.num_tops:  # a policy tells of the tokens that it has sampled only
            asked = replace(asked, num_tops=0, left_out=(*asked.left_out, "top_logprobs"))
        headers = request.headers
        wanted = AgentRequest(
            asked=asked,
            reply_id=api.new_id(),
            body=blake2b(body, digest_size=16).hexdigest(),
            key=headers.get("Idempotency-Key", ""),
            is_retry=headers.get("x-stainless-retry-count", "0") not in ("", "0"),
        )
        left_out = {"x-rollfeed-left-out": ", ".join(asked.left_out)} if asked.left_out else {}
        if asked.stream:
            return await self._stream(api, request, session, wanted, left_out)
        answer = await _asked(session, wanted)
        reply = api.reply(asked, answer.said, reply_id=answer.reply_id, created=answer.created)
        return _json(reply, headers=left_out)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._sessions.of_key(_key_of(request))
        asked = _ANTHROPIC.read_count(await _decoded(await self._read(request, session)))
        return _json(_ANTHROPIC.count(await session.num_prompt_tokens(asked)))

    async def _stream(
        self, api: ChatApi, request: web.Request, session: Session, wanted: AgentRequest, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Answer by events: they are opened while the turn is sampled, and tell it when it is whole."""
        task = asyncio.ensure_future(_asked(session, wanted))
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", **headers}
        )
        try:
            await asyncio.wait([task], timeout=_OPEN_SECONDS)
            if task.done():
                answer = task.result()
                events = api.events(wanted.asked, reply_id=answer.reply_id, created=answer.created)
                told = events.opening(prompt_tokens=answer.said[0].prompt_tokens)
                await response.prepare(request)
            else:
                events = api.events(wanted.asked, reply_id=wanted.reply_id, created=int(time.time()))
                await response.prepare(request)
                await _write(request, response, events.opening())
                while not task.done():
                    await asyncio.wait([task], timeout=_PING_SECONDS)
                    if not task.done():
                        await _write(request, response, events.ping())
                told = b""
                try:
                    answer = task.result()
                except ApiError as error:
                    self._note(error)
                    await _write(request, response, events.failure(error))
                    return response
            await _write(request, response, told + b"".join(stream_of(events, answer.said)))
            await response.write_eof()
            return response
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def _read(self, request: web.Request, session: Session) -> bytes:
        """Return a body within the session's bound; of a larger one nothing is read where its size is told."""
        most, size = session.caps.max_body_bytes, request.content_length or 0
        held = self._body_bytes.get(session.session_id, 0)
        if size <= most < held + size:
            raise ApiError(
                f"the requests under way of this session are larger than {most} bytes", kind=ErrorKind.RATE_LIMIT
            )
        self._body_bytes[session.session_id] = held + size
        try:
            return await self._body(request)
        finally:
            left = self._body_bytes.pop(session.session_id) - size
            if left:
                self._body_bytes[session.session_id] = left

    async def _body(self, request: web.Request) -> bytes:
        """Return a body that comes in time and is not too large, which is known at once where its size is told."""
        most, waits = self._sessions.caps.max_body_bytes, not request.content.is_eof()
        try:
            if (request.content_length or 0) > most:
                raise web.HTTPRequestEntityTooLarge(most)
            async with asyncio.timeout(self._reading_seconds) if waits else nullcontext():
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise ApiError(f"the body is larger than {most} bytes", kind=ErrorKind.TOO_LARGE) from None
        except TimeoutError:
            raise ApiError(f"the body has not come within {self._reading_seconds:g} seconds") from None

    async def _object(self, request: web.Request) -> dict[str, Any]:
        """Return the object in an operator's request; an empty one where there is no body."""
        body = await self._body(request)
        decoded = await _decoded(body) if body.strip() else {}
        if not isinstance(decoded, dict):
            raise ApiError("the body must be a JSON object")
        return decoded

    async def _models(self, request: web.Request) -> web.Response:
        self._sessions.of_key(_key_of(request))
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "rollfeed", "type": "model", "display_name": name}
            for name in self._sessions.policy.models
        ]
        return _json({"object": "list", "data": models, "has_more": False})

    async def _open(self, request: web.Request) -> web.Response:
        self._check_operator(request)
        body = await self._object(request)
        unknown = sorted(body.keys() - {"session_id", "metadata", "label"})
        session_id, metadata = body.get("session_id"), body.get("metadata")
        if unknown:
            raise ApiError(f"{unknown[0]:.80} is not known: there are session_id, metadata and label", param=unknown[0])
        if not isinstance(session_id, str | None) or session_id == "":
            raise ApiError("session_id must be a text", param="session_id")
        if not isinstance(metadata, dict | None):
            raise ApiError("metadata must be an object", param="metadata")
        about = {"metadata": metadata or {}, "label": body.get("label")}
        opened = self._sessions.open(about, session_id=session_id)
        found = addresses(f"{request.scheme}://{request.host}", opened.key)
        return _json({"id": opened.session.session_id, **found})

    async def _show(self, request: web.Request) -> web.Response:
        self._check_operator(request)
        return _json(_shown(self._sessions.of_id(request.match_info["id"])))

    async def _drop(self, request: web.Request) -> web.Response:
        self._check_operator(request)
        await self._sessions.drop(request.match_info["id"])
        return _json({"id": request.match_info["id"], "deleted": True})

    async def _finish(self, request: web.Request) -> web.Response:
        self._check_operator(request)
        reward = (await self._object(request)).get("reward")
        values = reward.values() if isinstance(reward, dict) else [] if reward is None else [reward]
        if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
            raise ApiError("reward must be a number, or an object of numbers", param="reward")
        if not all(isinstance(each, float) or -_MOST_INTEGER <= each < _MOST_INTEGER for each in values):
            raise ApiError("reward has an integer of more than 64 bits", param="reward")
        session_id = request.match_info["id"]
        lines = await self._sessions.finish(session_id, reward=reward)
        told = _encoder.encode(session_id)
        body = b'{"id":%b,"samples":[%b]}' % (told, b",".join(lines.splitlines()))
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def _health(self, _request: web.Request) -> web.Response:
        return _json({"status": "ok", "sessions": self._sessions.num_open})

    async def _metrics(self, _request: web.Request) -> web.Response:
        told = families(self._sessions.totals, num_open=self._sessions.num_open)
        return web.Response(body=prometheus_text(told), headers={"Content-Type": PROMETHEUS_TYPE})

    def _check_operator(self, request: web.Request) -> None:
        if self._token and not is_key(_key_of(request), self._token):
            raise ApiError("this needs the operator's token as API key", kind=ErrorKind.AUTHENTICATION)

    @web.middleware
    async def _errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Give every error the form of the API that was asked."""
        try:
            return await handler(request)
        except ApiError as error:
            problem = error
        except web.HTTPException as error:
            problem = ApiError(f"{request.method} {request.path:.200}: {error.reason}", kind=ErrorKind.NOT_FOUND)
        except ConnectionError:
            return web.Response(status=_CLIENT_LEFT)  # to nobody
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            problem = ApiError("internal error; the gateway's log has the details", kind=ErrorKind.API_ERROR)
        self._note(problem)
        api = next((each for path, each in CHAT_APIS.items() if path in request.path), _OPENAI)
        status, content = api.error(problem)
        response = _json(content, status=status)
        if problem.kind is ErrorKind.TOO_LARGE:
            response.force_close()
        return response

    def _note(self, error: ApiError) -> None:
        self._sessions.totals.refused[error.kind.value] += 1


def addresses(address: str, key: str) -> dict[str, str]:
    """Return how an agent reaches its session: ``key``, and ``base_url`` as clients of both APIs take it."""
    return {"key": key, "openai_base_url": f"{address}/s/{key}/v1", "anthropic_base_url": f"{address}/s/{key}"}


async def _asked(session: Session, wanted: AgentRequest) -> AgentReply:
    try:
        return await session.ask(wanted)
    except SessionAbortedError:
        raise ApiError("the engine was told to abort", kind=ErrorKind.OVERLOADED) from None


async def _write(request: web.Request, response: web.StreamResponse, content: bytes) -> None:
    """Send a piece of a stream, to a client that takes it in time."""
    transport = request.transport
    if len(content) < _SMALL_BYTES and transport is not None and not transport.get_write_buffer_size():
        await response.write(content)  # which has nothing to wait for
        return
    try:
        async with asyncio.timeout(_WRITING_SECONDS):
            await response.write(content)
    except TimeoutError:
        raise ConnectionError("the client takes nothing") from None


async def _decoded(body: bytes) -> Any:
    try:
        return await decoded_body(body, large_bytes=_LARGE_BYTES)
    except ValueError as error:
        raise ApiError(str(error)) from None


def _key_of(request: web.Request) -> str:
    """Return the key in the URL, or else the API key in either API's header."""
    in_url = request.match_info.get("key")
    return key_of(request) if in_url is None else in_url


def _json(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=_encoder.encode(content), status=status, headers=headers, content_type="application/json", charset="utf-8"
    )


def _shown(opened: OpenSession) -> dict[str, Any]:
    """Return what operators see of a session."""
    session = opened.session
    return {
        "id": session.session_id,
        "opened": session.opened,
        "metadata": opened.about.get("metadata") or {},
        "num_turns": len(session.tree.turns),
        "num_tokens": session.num_tokens,
        "ended_by": session.ended_by,
    }
