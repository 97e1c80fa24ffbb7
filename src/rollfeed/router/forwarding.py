"""Passes requests for tokens on to workers: as the bytes that they are, and again elsewhere where nothing was seen."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
from aiohttp import web

from rollfeed.base.serving import decoded_body
from rollfeed.base.sglang_wire import ABORTED, RequestError, error_content
from rollfeed.engine.client.versions import VersionNameError, version_number
from rollfeed.engine.http import BrokenConnectionError, Connections, NotConnectedError
from rollfeed.engine.http.incoming import HttpReply
from rollfeed.engine.http.json_answers import EventStream, json_reply
from rollfeed.errors import EngineError
from rollfeed.router.fleet import Fleet, TransferAbortedError
from rollfeed.router.members import Member, Transfer
from rollfeed.router.request_fields import read_fields
from rollfeed.router.router_settings import RoutingPolicy
from rollfeed.router.worker_kinds import WorkerAsker

_VERSION = re.compile(rb'"weight_version":\s*"([^"]*)"|"weight_versions":\s*\[\s*\{\s*"version":\s*"([^"]*)"')
"""Of the last token, or of the first; in a JSON text quotes are escaped, so that this is a key."""
_CROSSING = re.compile(rb'"weight_versions":\s*\[[^\]]*\}\s*,\s*\{')
_LONGEST_VERSION_BYTES = 128
"""Of what these find, which may lie in two pieces of a stream."""
_MOST_PIECES_BYTES = 1 << 26
"""Of a stream that its client does not read."""
_ABORT_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""Pauses before an abort is sent again, as it may have overtaken its request."""
_BACKOFF_SECONDS = 0.1
_LARGE_BYTES = 1 << 16
_CLIENT_ENDED, _BAD_GATEWAY, _TOO_LATE = 499, 502, 504
_PASSED_ON = ("X-Request-Id", "X-Correlation-Id", "traceparent", "tracestate")
"""Headers that workers get, besides those that HTTP needs."""
_DONE = b"data: [DONE]\n\n"
_RETRIED = frozenset({429, 500, 502, 503, 504})


class KeepsSpans(Protocol):
    """Cache of what was sampled, by its tokens."""

    def rewrite(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body that is forwarded in place of one."""

    def keep(self, body: dict[str, Any], reply: dict[str, Any] | list[dict[str, Any]], *, policy_version: int) -> None:
        """Remember what a worker has answered to a body that was forwarded, and make of it what its client wants."""


class FailedTry(NamedTuple):
    """A try that another worker may do better; the client has seen nothing of it."""

    status: int
    content: bytes | bytearray
    headers: dict[str, str]


class Forwarder:
    """Answers the routes that are passed on to one worker."""

    def __init__(
        self, fleet: Fleet, connections: Connections, asker: WorkerAsker, *, spans: KeepsSpans | None = None
    ) -> None:
        self._fleet = fleet
        self._settings = fleet.settings
        self._connections = connections
        self._asker = asker
        self._spans = spans
        self._with_prompt = fleet.settings.policy is RoutingPolicy.PREFIX
        self._behind: set[asyncio.Task[None]] = set()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Answer a request with what a worker answers.

        The client's leaving ends it there, as any other end of the connection to the worker: nothing is aborted by its
        id then, which a client that asks again may have given to the next one.
        """
        body, given = await request.read(), None
        if self._spans is not None and request.path == "/generate":
            came, given = await self._rewritten(body)
            body = body if given is came else msgspec.json.encode(dict(given))
        fields = read_fields(body, request.headers, with_prompt=self._with_prompt)
        transfer = Transfer(request.path, fields, given)
        try:
            return await self._tries(request, body, transfer)
        except TransferAbortedError:
            return await self._aborted(transfer)
        finally:
            self._fleet.end(transfer)

    async def abort(self, transfer: Transfer) -> None:
        """End a request where it is, and see to it that it does end."""
        transfer.abort()
        member = transfer.member
        if member is None:
            return
        if not await self._send_abort(member, transfer.fields.rids):
            transfer.interrupt(member)
            return
        self._spawn(self._insist(transfer, member))

    async def close(self) -> None:
        """End what is still to be sent behind requests that have ended."""
        for task in self._behind:
            task.cancel()
        await asyncio.gather(*self._behind, return_exceptions=True)

    async def _tries(self, request: web.Request, body: bytes, transfer: Transfer) -> web.StreamResponse:
        deadline = asyncio.get_running_loop().time() + self._settings.request_seconds
        failed, num_tries = FailedTry(_BAD_GATEWAY, b"", {}), 0
        while num_tries < self._settings.max_tries:
            member = await self._fleet.admit(transfer)
            if member in transfer.avoided:
                await asyncio.sleep(_BACKOFF_SECONDS * 2**num_tries)
            try:
                outcome = await self._try(request, member, body, transfer, deadline=deadline)
            finally:
                transfer.scope = None
                self._fleet.leave(transfer)
            if isinstance(outcome, web.StreamResponse):
                return outcome
            if transfer.is_aborted:
                raise TransferAbortedError
            is_lack = transfer.path in member.lacks
            failed = outcome
            transfer.avoided.add(member)
            if not (transfer.is_interrupted or is_lack):
                num_tries += 1
            transfer.is_interrupted = False
            self._fleet.counters["retries"] += 1
        return web.Response(body=failed.content, status=failed.status, headers=failed.headers)

    async def _try(
        self, request: web.Request, member: Member, body: bytes, transfer: Transfer, *, deadline: float
    ) -> web.StreamResponse | FailedTry:
        """Return a response, or a failure that the client has seen nothing of."""
        stream = _ToClient(request) if transfer.fields.stream else None
        path = request.path_qs
        given = {name: value for name in _PASSED_ON if (value := request.headers.get(name)) and value.isascii()}
        try:
            async with asyncio.timeout_at(deadline) as transfer.scope:
                if stream is None:
                    reply = await self._connections.request(request.method, member.address, path, body, headers=given)
                else:
                    taking: dict[str, Any] = {"pieces": stream.put}
                    if transfer.given is not None:
                        taking = {"events": partial(self._take_event, transfer, stream)}
                    sent = self._connections.request(
                        request.method, member.address, path, body, headers=given, **taking
                    )
                    reply = await stream.send(sent, is_good=partial(self._is_current, member, transfer))
        except TimeoutError:
            if not transfer.is_interrupted:
                transfer.is_aborted = False
                told = f"no reply within {self._settings.request_seconds:g} s"
                return await self._ended(stream, _TOO_LATE, told, is_final=True)
            return await self._ended(stream, _BAD_GATEWAY, f"{member.address} was lost")
        except (NotConnectedError, BrokenConnectionError) as error:
            member.is_suspect = True
            member.woken.set()
            return await self._ended(stream, _BAD_GATEWAY, f"{member.address}: {error}")
        if stream is not None and stream.has_begun:
            return await stream.end(_DONE if transfer.given is not None else b"")
        return self._whole(member, transfer, reply.status, reply.headers, reply.content or b"")

    def _whole(
        self, member: Member, transfer: Transfer, status: int, told: dict[str, str], content: bytes | bytearray
    ) -> web.Response | FailedTry:
        headers = {"Content-Type": told.get("content-type", "application/json"), "X-Worker": member.address}
        if "retry-after" in told:
            headers["Retry-After"] = told["retry-after"]
        elif status in (429, 503):
            headers["Retry-After"] = "1"
        if status in _RETRIED:
            return FailedTry(status, content, headers)
        if status in (404, 405) and (status == 405 or b"Not Found" in content):
            member.lacks.add(transfer.path)
            self._fleet.changed()
            return FailedTry(status, content, headers)
        if status == 200 and not self._is_current(member, transfer, content):
            told_as = f"{member.address} has sampled with older weights than version {transfer.policy_version}"
            return FailedTry(_BAD_GATEWAY, msgspec.json.encode(error_content(told_as)), headers)
        if transfer.given is not None and status == 200:
            content = self._kept(transfer, content)
        return web.Response(body=content, status=status, headers=headers)

    def _is_current(self, member: Member, transfer: Transfer, content: bytes | bytearray) -> bool:
        """Whether a reply was sampled by weights that are no older than those it was admitted to."""
        for match in _VERSION.finditer(content):
            name = (match[1] or match[2] or b"").decode(errors="replace")
            if name == member.version_name and member.policy_version == transfer.policy_version:
                continue
            try:
                version = version_number(name)
            except VersionNameError:
                continue  # its next probe says so
            if version < transfer.policy_version:
                self._fleet.counters["stale_replies"] += 1
                member.policy_version = version
                member.version_name = name
                self._fleet.changed()
                member.woken.set()
                return False
            if version > self._fleet.policy_version:
                self._fleet.note_version(member, name)
        if not transfer.is_crossing and _CROSSING.search(content):
            transfer.is_crossing = True
            self._fleet.counters["crossing_replies"] += 1
        return True

    async def _ended(
        self, stream: _ToClient | None, status: int, told: str, *, is_final: bool = False
    ) -> web.StreamResponse | FailedTry:
        """Say that a try has failed: to the client, where it has seen some of it."""
        content = msgspec.json.encode(error_content(told))
        if stream is not None and stream.has_begun:
            return await stream.end(b"data: " + content + b"\n\n")
        headers = {"Content-Type": "application/json"}
        if is_final:
            return web.Response(body=content, status=status, headers=headers)
        return FailedTry(status, content, headers)

    async def _rewritten(self, body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
        assert self._spans is not None
        try:
            given = await decoded_body(body, large_bytes=_LARGE_BYTES)
        except ValueError as error:
            raise RequestError(str(error)) from None
        if not isinstance(given, dict):
            raise RequestError("the body is no JSON object")
        return given, await asyncio.to_thread(self._spans.rewrite, given)

    def _kept(self, transfer: Transfer, content: bytes | bytearray) -> bytes:
        """Have the cache keep what a reply says, and return what its client gets of it."""
        assert self._spans is not None
        assert transfer.given is not None
        try:
            reply = msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return bytes(content)  # which its client judges
        if isinstance(reply, dict | list):
            self._spans.keep(transfer.given, reply, policy_version=transfer.policy_version)
        return msgspec.json.encode(reply)

    def _take_event(self, transfer: Transfer, stream: _ToClient, content: bytes) -> None:
        stream.put(b"data: " + self._kept(transfer, content) + b"\n\n")

    async def _aborted(self, transfer: Transfer) -> web.Response:
        """Return what an engine answers when it ends a request that it has not begun."""
        rids = transfer.fields.rids
        if transfer.path != "/generate":
            return await json_reply(error_content("the request was aborted"), status=_CLIENT_ENDED)
        replies = [_aborted_reply(rid, transfer, str(self._fleet.policy_version)) for rid in rids or ("",)]
        return await json_reply(replies[0] if len(replies) == 1 else replies)

    async def _insist(self, transfer: Transfer, member: Member) -> None:
        for seconds in _ABORT_SECONDS:
            await asyncio.sleep(seconds)
            if transfer.member is not member:
                return
            await self._send_abort(member, transfer.fields.rids)
        if transfer.member is member:
            transfer.interrupt(member)

    async def _send_abort(self, member: Member, rids: tuple[str, ...]) -> bool:
        if member.kind is None:
            return False
        try:
            return bool(rids) and await self._asker.abort(member.address, member.kind, rids)
        except EngineError:
            return False

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)


class _ToClient:
    """A stream on its way to the client, as it comes."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._events = EventStream(request)
        self.has_begun = False
        """Whether the client has seen some of it."""
        self._pieces: deque[bytes] = deque()
        self._num_bytes = 0
        self._arrived = asyncio.Event()

    def put(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > _MOST_PIECES_BYTES:
            if self._request.transport is not None:
                self._request.transport.abort()  # it would not read the error either
            raise BrokenConnectionError("the client does not read its stream")
        self._pieces.append(piece)
        self._arrived.set()

    async def send(self, sent: Coroutine[Any, Any, HttpReply], *, is_good: Callable[[bytes], bool]) -> HttpReply:
        """Pass pieces on until the reply has ended, and return it; raises BrokenConnectionError for a bad one."""
        task, end = asyncio.create_task(sent), b""
        task.add_done_callback(lambda _: self._arrived.set())
        try:
            while not (task.done() and not self._pieces):
                await self._arrived.wait()
                self._arrived.clear()
                while self._pieces:
                    piece = self._pieces.popleft()
                    self._num_bytes -= len(piece)
                    if not is_good(end + piece):
                        raise BrokenConnectionError("sampled with older weights")
                    end = piece[-_LONGEST_VERSION_BYTES:]
                    self.has_begun = True
                    await self._events.write(piece)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def end(self, last: bytes = b"") -> web.StreamResponse:
        """End the client's stream, with a last event where it has failed."""
        return await self._events.end(last)


def _aborted_reply(rid: str, transfer: Transfer, version: str) -> dict[str, Any]:
    told = {
        "id": rid,
        "finish_reason": ABORTED,
        "prompt_tokens": len(transfer.fields.prompt_ids),
        "completion_tokens": 0,
        "cached_tokens": 0,
        "weight_version": version,
        "output_token_logprobs": [],
    }
    return {"text": "", "output_ids": [], "meta_info": told}
