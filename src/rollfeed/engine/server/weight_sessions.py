"""Endpoints by which a publisher gives the server tensors: in its requests, or by a process group.

They are SGLang's (0.5.23), with a difference: tensors of a session are held until it ends, and then replace the weights
together, if one of them came with the name of a version. A publisher that dies on the way changes nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rollfeed.base.sglang_wire import RequestError
from rollfeed.base.waiting import in_own_thread
from rollfeed.engine.http.json_answers import json_reply, read_json
from rollfeed.engine.server.service import Service
from rollfeed.errors import EngineProtocolError

if TYPE_CHECKING:
    from rollfeed.base.update_group import UpdateGroup

_OTHER_BYTES = 1 << 22
"""Of a request with tensors in it."""
_LARGEST_TYPE_BYTES = 8
_MOST_RANKS, _MOST_PORTS = 1 << 16, 1 << 16
_GROUP_SECONDS = 300.0
_BUCKET = "flattened_bucket"
_THREAD = "weights"
"""The name of threads that wait for a publisher, who may be gone; the server's end does not wait for them."""


class WeightHandlers:
    """Sessions of weight updates and the process groups that they may come by."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._held: dict[str, Any] | None = None
        """Tensors of the session; None without one."""
        self._version: str | None = None
        self._groups: dict[str, UpdateGroup] = {}

    @property
    def _most_bytes(self) -> int:
        """Of all weights of the model, in the largest type."""
        return _LARGEST_TYPE_BYTES * sum(map(math.prod, self._service.engine.shapes.values()))

    def routes(self) -> list[web.RouteDef]:
        """Return the endpoints."""
        return [
            web.post("/begin_weight_update", self.begin),
            web.post("/end_weight_update", self.end),
            web.post("/update_weights_from_tensor", self.update_from_tensor),
            web.post("/init_weights_update_group", self.init_group),
            web.post("/destroy_weights_update_group", self.destroy_group),
            web.post("/update_weights_from_distributed", self.update_from_group),
        ]

    async def begin(self, request: web.Request) -> web.Response:
        """Open a session."""
        await read_json(request, optional=True)
        if self._held is not None:
            return await _refused("a weight-update session is already open; call end_weight_update() first")
        self._held, self._version = {}, None
        return await _taken("Success")

    async def end(self, request: web.Request) -> web.Response:
        """Close a session; what came with it replaces the weights now."""
        await read_json(request, optional=True)
        if self._held is None:
            return await _refused("no weight-update session is open; call begin_weight_update() first")
        held, version, self._held, self._version = self._held, self._version, None, None
        if version is None:
            return await _taken("Success: tensors without the name of a version are not kept")
        try:
            await self._service.to_the_end(self._service.update_from_tensors(held, version))
        except EngineProtocolError as error:
            return await _refused(f"Failed to update weights: {error}")
        return await _taken("Success")

    async def update_from_tensor(self, request: web.Request) -> web.Response:
        """Take a bucket, with its bytes in the request."""
        from rollfeed.base.tensor_buckets import read_bucket

        if self._held is None:  # before all of it is read
            return await _outside("update_weights_from_tensor")
        # In base64, and beside it what the form needs.
        body = await read_json(request.clone(client_max_size=2 * self._most_bytes + _OTHER_BYTES))
        texts = body.get("serialized_named_tensors")
        if not (isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], str)):
            raise RequestError("serialized_named_tensors must be a list of one text, since the model is not spread")
        if body.get("load_format") != _BUCKET:
            raise RequestError(f"load_format must be {_BUCKET!r}")
        if (held := self._held) is None:
            return await _outside("update_weights_from_tensor")
        try:
            tensors = await asyncio.to_thread(read_bucket, texts[0])
        except ValueError as error:
            raise RequestError(f"serialized_named_tensors: {error}") from None
        return await self._hold(held, tensors, body)

    async def init_group(self, request: web.Request) -> web.Response:
        """Join a process group, in which a publisher has rank 0."""
        from rollfeed.base.update_group import UpdateGroup, connect

        body = await read_json(request)
        name, host, port = (
            _given(body, "group_name", str),
            _given(body, "master_address", str),
            _given(body, "master_port", int),
        )
        rank, world_size = _given(body, "rank_offset", int), _given(body, "world_size", int)
        for field, value, most in (("master_port", port, _MOST_PORTS), ("world_size", world_size, _MOST_RANKS + 1)):
            if not 1 <= value < most:
                raise RequestError(f"{field} must be at least 1 and below {most}, got {value}")
        if not 0 <= rank < world_size:
            raise RequestError(f"rank_offset must be at least 0 and below world_size, got {rank}")
        if body.get("backend") != "gloo":
            return await _refused("Failed to initialize custom process group: this server takes the backend gloo only")
        if name in self._groups:
            return await _refused(f"Failed to initialize custom process group: {name} is there already")

        def join() -> UpdateGroup:
            store = connect(host, port, timeout_seconds=_GROUP_SECONDS)
            return UpdateGroup(
                store, name, backend="gloo", rank=rank, world_size=world_size, timeout_seconds=_GROUP_SECONDS
            )

        try:
            self._groups[name] = await in_own_thread(join, name=_THREAD)
        except (RuntimeError, ValueError, TypeError) as error:
            return await _refused(f"Failed to initialize custom process group: {error}")
        return await _taken("Succeeded to initialize custom process group.")

    async def destroy_group(self, request: web.Request) -> web.Response:
        """Leave a process group."""
        group = self._groups.pop(_given(await read_json(request), "group_name", str), None)
        if group is None:
            return await _refused("The group to be destroyed does not exist.")
        await in_own_thread(group.leave, name=_THREAD)
        return await _taken("Succeeded to destroy custom process group.")

    async def update_from_group(self, request: web.Request) -> web.Response:
        """Receive a bucket by a process group."""
        from rollfeed.base.tensor_buckets import bucket_of

        body = await read_json(request)
        name = _given(body, "group_name", str)
        if (held := self._held) is None:
            return await _outside("update_weights_from_distributed")
        group = self._groups.get(name)
        if group is None or body.get("load_format") != _BUCKET:
            reason = f"load_format must be {_BUCKET!r}" if group else f"Group {name} not in {list(self._groups)}."
            return await _refused(f"Failed to receive weights: {reason}")
        try:
            described = (body.get(name, []) for name in ("names", "dtypes", "shapes"))
            bucket = bucket_of(*described, most_bytes=self._most_bytes)
            await in_own_thread(lambda: group.broadcast(bucket.bytes_B), name=_THREAD)
            tensors = bucket.tensors()
        except (RuntimeError, ValueError, TypeError) as error:
            return await _refused(f"Failed to receive weights: {error}")
        return await self._hold(held, tensors, body)

    async def _hold(self, held: dict[str, Any], tensors: Mapping[str, Any], body: Mapping[str, Any]) -> web.Response:
        if self._held is not held:  # its session has ended while they came, and another one may have begun
            return await _outside("an update")
        shapes = self._service.engine.shapes
        if wrong := [name for name, tensor in tensors.items() if tuple(tensor.shape) != shapes.get(name)]:
            # At once, so that no more is held than the model has.
            told = f"weight {wrong[0]!r}: the model has no weight of this name and shape"
            return await _refused(f"Failed to update weights: {told}")
        held |= tensors
        if body.get("weight_version") is not None:
            self._version = _given(body, "weight_version", str)
        return await _taken("Success")


def _given(body: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = body.get(name)
    if type(value) is not kind or value == "":
        raise RequestError(f"{name} is missing: give {'a text' if kind is str else 'a number'}")
    return value


async def _taken(message: str) -> web.Response:
    return await json_reply({"success": True, "message": message})


async def _refused(message: str) -> web.Response:
    return await json_reply({"success": False, "message": message}, status=400)


async def _outside(what: str) -> web.Response:
    return await _refused(f"{what} must run between begin_weight_update() and end_weight_update()")
