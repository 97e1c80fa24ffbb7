"""Routes that steer all workers at once: aborts, pauses, caches, weights, and who the workers are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from rollfeed.base.sglang_wire import RequestError
from rollfeed.base.waiting import until_done
from rollfeed.engine.http import Http
from rollfeed.engine.http.json_answers import json_reply, read_json
from rollfeed.errors import EngineError
from rollfeed.router.fleet import Fleet
from rollfeed.router.forwarding import Forwarder
from rollfeed.router.members import Member, MemberState
from rollfeed.router.watching import Watcher
from rollfeed.router.weight_updates import PAUSED, UPDATE_ROUTES, WeightUpdates
from rollfeed.router.worker_kinds import WorkerAsker, WorkerKind

_UNAVAILABLE = 503
_TO_ALL = ("/release_memory_occupation", "/resume_memory_occupation", "/weights_checker", "/sleep", "/wake_up")
_KEEPING_MODES = {"retract", "in_place", "keep"}
_MODES = {"abort", "wait", *_KEEPING_MODES}


class RouterControl:
    """Everything that is not passed on to one worker."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        asker: WorkerAsker,
        http: Http,
        watcher: Watcher,
        updates: WeightUpdates,
        forwarder: Forwarder,
    ) -> None:
        self._fleet = fleet
        self._asker = asker
        self._http = http
        self._watcher = watcher
        self._updates = updates
        self._forwarder = forwarder

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/workers", self._list),
            web.post("/workers", self._add),
            web.get("/workers/{id}", self._one),
            web.delete("/workers/{id}", self._remove),
            web.get("/list_workers", self._old_list),
            web.post("/add_worker", self._old_add),
            web.post("/remove_worker", self._old_remove),
            web.post("/abort_request", self._abort),
            web.post("/abort_requests", self._abort),
            web.post("/pause_generation", self._pause),
            web.post("/continue_generation", self._continue),
            web.post("/pause", self._pause),
            web.post("/resume", self._continue),
            web.get("/is_paused", self._is_paused),
            *(route("/flush_cache", self._flush) for route in (web.get, web.post)),
            web.post("/reset_prefix_cache", self._flush),
            web.post("/update_weights_from_disk", self._update_from_disk),
            *(web.post(path, self._update_step) for path in UPDATE_ROUTES),
            *(web.post(path, self._to_all) for path in _TO_ALL),
        ]

    async def _list(self, _request: web.Request) -> web.Response:
        listed = [described(member, self._fleet.policy_version) for member in self._fleet]
        stats = {"regular_count": len(listed), "prefill_count": 0, "decode_count": 0}
        told = {"policy_version": self._fleet.policy_version, "closed_by": self._fleet.closed_by}
        return await json_reply({"workers": listed, "total": len(listed), "stats": stats, **told})

    async def _add(self, request: web.Request) -> web.Response:
        member = await self._joined((await read_json(request)).get("url"))
        told = {"status": "accepted", "worker_id": member.member_id, "url": member.address}
        state = {"location": f"/workers/{member.member_id}", "message": _told(member)}
        return await json_reply({**told, **state}, status=202)

    async def _one(self, request: web.Request) -> web.Response:
        return await json_reply(described(self._found(request), self._fleet.policy_version))

    async def _remove(self, request: web.Request) -> web.Response:
        member = self._found(request)
        self._watcher.remove(member)
        told = {"status": "accepted", "worker_id": member.member_id, "message": "worker removed"}
        return await json_reply(told, status=202)

    async def _old_list(self, _request: web.Request) -> web.Response:
        return await json_reply({"urls": [member.address for member in self._fleet]})

    async def _old_add(self, request: web.Request) -> web.Response:
        member = await self._joined(request.query.get("url"))
        return web.Response(text=f"Successfully added worker: {member.address} ({_told(member)})")

    async def _old_remove(self, request: web.Request) -> web.Response:
        address = checked_worker(request.query.get("url"))
        if (member := self._fleet.members.get(address)) is not None:
            self._watcher.remove(member)
        return web.Response(text=f"Successfully removed worker: {address}")

    async def _joined(self, url: Any) -> Member:
        return await self._watcher.add(checked_worker(url))

    def _found(self, request: web.Request) -> Member:
        """Return the worker that a path names, by its id or its address."""
        wanted = request.match_info["id"]
        for member in self._fleet:
            if wanted in (member.member_id, member.address):
                return member
        raise RequestError(f"there is no worker {wanted}", status=404)

    async def _abort(self, request: web.Request) -> web.Response:
        """Abort in SGLang's form or vLLM's; unknown ids go to all workers, as a router that was restarted must."""
        body = await read_json(request)
        rid = body.get("rid", body.get("request_ids"))
        if body.get("abort_all") is True or (rid is None and request.path == "/abort_requests"):
            await self._abort_all()
            return web.Response()
        rids = [rid] if isinstance(rid, str) else rid
        if not isinstance(rids, list) or not all(isinstance(each, str) for each in rids):
            raise RequestError("give rid, request_ids or abort_all: true")
        owned = {each: self._fleet.owned(each) for each in rids}
        found = {transfer for transfers in owned.values() for transfer in transfers}
        await asyncio.gather(*(self._forwarder.abort(transfer) for transfer in found))
        if unknown := [each for each, transfers in owned.items() if not transfers]:
            await self._updates.each(
                self._fleet.ready, lambda member, kind: self._asker.abort(member.address, kind, unknown)
            )
        return web.Response()

    async def _abort_all(self) -> None:
        for transfer in tuple(self._fleet.transfers):
            transfer.abort()
        await self._updates.abort_all(
            [each for each in self._fleet if each.kind and each.state is not MemberState.DOWN]
        )

    async def _pause(self, request: web.Request) -> web.Response:
        """Hold all workers, and all requests that come meanwhile, here."""
        mode = (await read_json(request, optional=True)).get("mode") or request.query.get("mode") or "abort"
        if mode not in _MODES:
            raise RequestError(f"mode must be one of {', '.join(sorted(_MODES))}, got {mode!r}")
        self._fleet.close(PAUSED)
        keeps = mode in _KEEPING_MODES
        self._updates.keeps_running = self._updates.keeps_running or keeps
        await self._watcher.until_brought()
        self._updates.held = tuple({*self._updates.held, *self._fleet.ready})

        async def pause(member: Member, kind: WorkerKind) -> None:
            if kind is WorkerKind.SGLANG:
                told = {"keep": "in_place", "wait": "abort"}.get(mode, mode)
                await self._asker.command(member.address, "/pause_generation", {"mode": told})
            else:
                await self._asker.command(member.address, f"/pause?mode={'keep' if keeps else mode}", None)

        await self._told_all(pause)
        return await json_reply({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await read_json(request, optional=True)
        await until_done(asyncio.create_task(self._release_all()))
        return await json_reply({"message": "Generation continued successfully.", "status": "ok"})

    async def _release_all(self) -> None:
        async def release(member: Member, kind: WorkerKind) -> None:
            path = "/continue_generation" if kind is WorkerKind.SGLANG else "/resume"
            await self._asker.command(member.address, path, {} if kind is WorkerKind.SGLANG else None)

        held, self._updates.held = self._updates.held, ()
        problems = await self._updates.each(held or self._fleet.ready, release)
        self._updates.keeps_running = False
        await self._updates.settle()
        self._fleet.open(PAUSED)
        _refuse(problems)

    async def _is_paused(self, _request: web.Request) -> web.Response:
        return await json_reply({"is_paused": PAUSED in (self._fleet.closed_by or "")})

    async def _flush(self, _request: web.Request) -> web.Response:
        async def flush(member: Member, kind: WorkerKind) -> None:
            path = "/flush_cache" if kind is WorkerKind.SGLANG else "/reset_prefix_cache"
            reply = await self._http.control("POST", member.address + path)
            if reply.status != 200:
                raise EngineError(f"{member.address}{path}: {reply.error}")
            self._fleet.chooser.forget_server(member.address)

        await self._told_all(flush)
        return web.Response(text="Cache flushed.\n")

    async def _update_from_disk(self, request: web.Request) -> web.Response:
        return await json_reply(await self._updates.from_folder(await read_json(request)))

    async def _update_step(self, request: web.Request) -> web.Response:
        return await json_reply(await self._updates.step(request.path, await read_json(request, optional=True)))

    async def _to_all(self, request: web.Request) -> web.Response:
        body, replies = await read_json(request, optional=True), dict[str, Any]()

        async def ask(member: Member, _kind: WorkerKind) -> None:
            replies[member.address] = await self._asker.command(member.address, request.path_qs, body)

        await self._told_all(ask)
        return await json_reply({"success": True, "workers": replies})

    async def _told_all(self, act: Callable[[Member, WorkerKind], Awaitable[object]]) -> None:
        """Act on all workers with the current weights; raises RequestError where one did not do it."""
        _refuse(await self._updates.each(self._fleet.ready, act))


def checked_worker(url: Any) -> str:
    """Return the address of a worker; raises RequestError if it is none."""
    if not isinstance(url, str) or not url:
        raise RequestError("url is missing: give the worker's address, as http://10.0.0.5:30000")
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_whole = False
    if not is_whole:
        raise RequestError(f"{url}: no address of a worker: give it as http://10.0.0.5:30000")
    return url.rstrip("/")


def described(member: Member, policy_version: int) -> dict[str, Any]:
    """Return what the list of workers says of one."""
    return {
        "id": member.member_id,
        "url": member.address,
        "model_id": member.model,
        "priority": 50,
        "cost": 1.0,
        "worker_type": "regular",
        "is_healthy": member.is_at(policy_version),
        "load": member.num_requests,
        "connection_mode": "http",
        "kind": member.kind.value if member.kind else None,
        "state": member.state.value,
        "reason": member.reason or None,
        "policy_version": member.policy_version,
        "weight_version": member.version_name,
        "num_tokens": member.num_tokens,
        "num_running": member.num_running,
        "num_waiting": member.num_waiting,
        "kv_use": member.kv_use,
        "metadata": {"model_path": member.model_path, "num_ranks": member.num_ranks},
    }


def _told(member: Member) -> str:
    return f"{member.state.value}: {member.reason}" if member.reason else member.state.value


def _refuse(problems: Mapping[Member, str]) -> None:
    if problems:
        raise RequestError("not all workers did it: " + "; ".join(problems.values()), status=_UNAVAILABLE)
