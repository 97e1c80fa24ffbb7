"""JSON bodies in and out, errors as one line, and server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from rollfeed.base.serving import decoded_body
from rollfeed.base.sglang_wire import RequestError, error_content
from rollfeed.chat_apis import CHAT_APIS, ApiError, ChatApi, ErrorKind
from rollfeed.errors import ConfigError, EngineError, EngineProtocolError, EngineUnavailableError

logger = logging.getLogger(__name__)

_LARGE_BYTES = 1 << 16
"""Bodies beyond this are decoded in a thread, so that the event loop goes on."""
_LARGE_REPLY_TOKENS = 1 << 12
_CLIENT_LEFT = 499
_encoder = msgspec.json.Encoder()

_ERROR_KINDS = {
    404: ErrorKind.NOT_FOUND,
    413: ErrorKind.TOO_LARGE,
    429: ErrorKind.RATE_LIMIT,
    500: ErrorKind.API_ERROR,
    503: ErrorKind.OVERLOADED,
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def read_json(request: web.Request, *, optional: bool = False) -> dict[str, Any]:
    """Return the object in a request's body.

    Raises:
        RequestError: If there is none; an empty body is an empty object when ``optional``.
    """
    body = await request.read()
    if optional and not body.strip():
        return {}
    try:
        decoded = await decoded_body(body, large_bytes=_LARGE_BYTES)
    except ValueError as error:
        raise RequestError(str(error)) from None
    if not isinstance(decoded, dict):
        raise RequestError("the body must be a JSON object")
    return decoded


async def json_reply(content: Any, *, num_tokens: int = 0, status: int = 200) -> web.Response:
    """Return a JSON response; one that carries many tokens is encoded in a thread."""
    encode = _encoder.encode
    body = await asyncio.to_thread(encode, content) if num_tokens > _LARGE_REPLY_TOKENS else encode(content)
    return web.Response(body=body, status=status, content_type="application/json")


def error_body(request: web.Request, message: str, status: int) -> dict[str, Any]:
    """Return an error as SGLang's endpoints word it; that of completions is flat."""
    if not request.path.startswith("/v1/"):
        return error_content(message)
    kind = {400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError"}.get(status, "InternalServerError")
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def _api_of(request: web.Request) -> ChatApi | None:
    """Return the API whose form a request has, where it is one for chats."""
    return next((api for path, api in CHAT_APIS.items() if request.path.startswith(path)), None)


def _error_reply(request: web.Request, message: str, status: int) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error, as the asked endpoint has it."""
    api = _api_of(request)
    if api is None:
        return status, error_body(request, message, status)
    return api.error(ApiError(message, kind=_ERROR_KINDS.get(status, ErrorKind.INVALID_REQUEST)))


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into one line of JSON; what was not foreseen is logged and kept from the client."""
    try:
        return await handler(request)
    except ApiError as error:
        api = _api_of(request)
        assert api is not None, f"{request.path} has no API for chats"
        status, body = api.error(error)
        return await json_reply(body, status=status)
    except RequestError as error:
        message, status = str(error), error.status
    except ConfigError as error:
        message, status = str(error), 400
    except EngineError as error:
        message, status = str(error), _status_of(error)
    except web.HTTPRequestEntityTooLarge:
        message, status = "the body is too large for this server", 413
    except web.HTTPException as error:
        message, status = error.reason, error.status
    except ConnectionError:
        return web.Response(status=_CLIENT_LEFT)  # to nobody
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        message, status = "internal error; the server's log has the details", 500
    status, body = _error_reply(request, message, status)
    response = await json_reply(body, status=status)
    if status == 429:
        response.headers["Retry-After"] = "1"
    return response


def _status_of(error: EngineError) -> int:
    if isinstance(error, EngineProtocolError):
        return 400
    return 503 if isinstance(error, EngineUnavailableError) else 500


class EventStream:
    """Server-sent events; the headers go out with the first one."""

    def __init__(self, request: web.Request, *, headers: Mapping[str, str] | None = None) -> None:
        self._request = request
        own = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        self._response = web.StreamResponse(headers={**own, **(headers or {})})

    async def send(self, content: Any) -> None:
        """Send one JSON value."""
        await self.write(b"data: " + _encoder.encode(content) + b"\n\n")

    async def write(self, events: bytes) -> None:
        """Send what is one event or several."""
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._response.write(events)

    async def end(self, last: bytes = b"") -> web.StreamResponse:
        """Say that nothing more comes."""
        if last:
            await self.write(last)
        await self._response.write_eof()
        return self._response
