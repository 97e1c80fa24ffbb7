"""Weights by broadcast: NCCL between GPUs, gloo between processors.

Each server has a group of its own with this process as rank 0, made while it serves. A server that dies takes no other
one along, and one that comes back gets a new group; the price is that the weights leave this process once a server.
SGLang takes one broadcast a bucket (``/update_weights_from_distributed``); vLLM all of them in one call, by its
backend ``nccl`` (``vllm/distributed/weight_transfer/nccl_engine.py`` of 0.32), joined by NCCL's own unique id.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import torch

from rollfeed.base.tensor_buckets import TensorBucket
from rollfeed.base.update_group import UpdateGroup, listen
from rollfeed.base.waiting import in_own_thread
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Command, MetServer, TransportContext
from rollfeed.types import TensorUpdate, WeightUpdate
from rollfeed.weights.transports.communicator import Communicator, unique_id
from rollfeed.weights.transports.staging import Staging, last_word, vllm_session, weight_session

BUCKET_BYTES = 1 << 28
_GROUP_SECONDS = 300.0
"""For all to join, and for a broadcast."""
_THREAD = "broadcast"
_VLLM = """start vLLM 0.32 with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "nccl"}'"""
T = TypeVar("T")


Sender = UpdateGroup | Communicator


class BroadcastTransport:
    """Fits :class:`rollfeed.protocols.WeightTransport`: servers receive tensors by process groups."""

    def __init__(self, context: TransportContext) -> None:
        # As SGLang sets it for itself: with another value at one end NCCL fails. It is read when NCCL first starts.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        self._is_vllm = context.kind == "openai"
        self._staging = Staging(context)
        self._links: dict[str, Link] = {}
        self._num_staged = 0

    def meet(self, servers: Sequence[MetServer]) -> None:
        self._staging.meet(servers)

    async def stage(self, update: TensorUpdate) -> WeightUpdate:
        buckets = await self._staging.buckets(update, most_bytes=BUCKET_BYTES)
        if self._is_vllm and not buckets[0].bytes_B.is_cuda:
            raise EngineProtocolError(
                "vLLM receives tensors of a GPU only, and these are in the memory of the processor: set "
                'engine.openai.weights_transport = "disk"'
            )
        self._num_staged += 1
        kind = VLLMBroadcast if self._is_vllm else SGLangBroadcast
        return kind(self._staging, self._links, buckets, self._num_staged, policy_version=update.policy_version)

    def close(self) -> None:
        for link in self._links.values():
            link.sender.leave()
        self._links.clear()


@dataclass(slots=True)
class Link:
    """A group that was joined with one server."""

    name: str
    sender: Sender
    number: int
    """Of the last update that came through it whole; it is used for the next one only."""


@dataclass(frozen=True, slots=True, eq=False)
class _Broadcast(WeightUpdate, ABC):
    staging: Staging
    links: dict[str, Link]
    buckets: tuple[TensorBucket, ...]
    number: int
    leaving_path: ClassVar[str] = "/destroy_weights_update_group"
    met: set[str] = field(default_factory=set)
    """Servers that have been prepared for this update."""

    async def prepare(self, address: str, command: Command) -> int:
        """Join a group, unless there is one that holds: a server that has missed an update may be a new one."""
        link, is_again = self.links.get(address), address in self.met
        self.met.add(address)
        if link is not None and (is_again or link.number != self.number - 1):
            await self._leave(address, command)
            link = None
        if link is None:
            name = f"rollfeed-{secrets.token_hex(6)}"
            try:
                sender = await self._join(address, command, name)
            except (OSError, RuntimeError) as error:
                raise EngineUnavailableError(f"{address}: no group for broadcasts: {error}") from error
            self.links[address] = Link(name, sender, number=self.number - 1)
        return 0

    async def load(self, address: str, command: Command) -> int:
        link = self.links.get(address)
        if link is None:
            raise EngineUnavailableError(f"{address}: its group for broadcasts is gone")
        try:
            await self._send(address, command, link)
        except BaseException:
            await self._leave(address, command)
            raise
        link.number = self.number
        return sum(bucket.bytes_B.nbytes for bucket in self.buckets) * self.staging.num_ranks(address)

    @property
    def on_gpu(self) -> bool:
        return bool(self.buckets[0].bytes_B.is_cuda)

    async def _leave(self, address: str, command: Command) -> None:
        link = self.links.pop(address, None)
        if link is not None:
            await in_own_thread(link.sender.leave, name=_THREAD)
            await last_word(command(self.leaving_path, {"group_name": link.name}))

    @abstractmethod
    async def _join(self, address: str, command: Command, name: str) -> Sender: ...

    @abstractmethod
    async def _send(self, address: str, command: Command, link: Link) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class SGLangBroadcast(_Broadcast):
    """Buckets that are broadcast one by one, each announced by a request."""

    async def _join(self, address: str, command: Command, name: str) -> Sender:
        host = await in_own_thread(lambda: own_host(address), name=_THREAD)
        store = await in_own_thread(lambda: listen(host, timeout_seconds=_GROUP_SECONDS), name=_THREAD)
        world_size, backend = 1 + self.staging.num_ranks(address), "nccl" if self.on_gpu else "gloo"
        body = {
            "master_address": host,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }

        def join() -> Sender:
            return UpdateGroup(
                store, name, backend=backend, rank=0, world_size=world_size, timeout_seconds=_GROUP_SECONDS
            )

        return await both(join, command("/init_weights_update_group", body), of=address)

    async def _send(self, address: str, command: Command, link: Link) -> None:
        has_begun = False
        try:
            async with weight_session(address, command):
                has_begun = True
                await self._send_buckets(address, command, link)
        except EngineProtocolError as error:
            if has_begun:
                raise EngineUnavailableError(f"{address}: its weights are not known: {error}") from error
            raise

    async def _send_buckets(self, address: str, command: Command, link: Link) -> None:
        try:
            for index, bucket in enumerate(self.buckets):
                body: dict[str, Any] = {
                    "names": bucket.names,
                    "dtypes": bucket.dtype_names,
                    "shapes": bucket.shapes,
                    "group_name": link.name,
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                if index == len(self.buckets) - 1:
                    body["weight_version"] = str(self.policy_version)
                sending = command("/update_weights_from_distributed", body)
                await both(partial(link.sender.broadcast, bucket.bytes_B), sending, of=address)
        except BaseException:
            # Before the session is ended: a server that waits for a broadcast does nothing else.
            await in_own_thread(link.sender.leave, name=_THREAD)
            raise


@dataclass(frozen=True, slots=True, eq=False)
class VLLMBroadcast(_Broadcast):
    """Buckets that vLLM receives in one call, cut where it cuts them."""

    leaving_path: ClassVar[str] = "/shutdown_weight_transfer_engine"

    async def _join(self, address: str, command: Command, name: str) -> Sender:
        del name
        group, world_size = unique_id(), 1 + self.staging.num_ranks(address)
        init_info = {
            "nccl_unique_id_b64": base64.b64encode(group).decode(),
            "rank_offset": 1,
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": BUCKET_BYTES,
        }
        device = self.buckets[0].bytes_B.device
        telling = command("/init_weight_transfer_engine", {"init_info": init_info})
        try:
            return await both(lambda: _joined(group, world_size, device), telling, of=address)
        except (EngineProtocolError, EngineUnavailableError) as error:
            raise type(error)(f"{error}: {_VLLM}") from error

    async def _send(self, address: str, command: Command, link: Link) -> None:
        update_info = {
            "names": [name for bucket in self.buckets for name in bucket.names],
            "dtype_names": [name for bucket in self.buckets for name in bucket.dtype_names],
            "shapes": [shape for bucket in self.buckets for shape in bucket.shapes],
        }

        def send() -> None:
            for bucket in self.buckets:
                link.sender.broadcast(bucket.bytes_B)

        async with vllm_session(address, command, policy_version=self.policy_version):
            try:
                await both(send, command("/update_weights", {"update_info": update_info}), of=address)
            except BaseException:
                # Before the session is ended, as with SGLang.
                await in_own_thread(link.sender.leave, name=_THREAD)
                raise


def _joined(group: bytes, num_ranks: int, device: torch.device) -> Communicator:
    communicator = Communicator(group, num_ranks=num_ranks, rank=0, device=device)
    try:
        communicator.try_out()
    except RuntimeError:
        communicator.leave()
        raise
    return communicator


async def both(act: Callable[[], T], telling: Any, *, of: str) -> T:
    """Return what ``act`` does here while a server does its part; the first that fails is not followed by the other.

    Raises:
        EngineError: If the server refuses or does not answer.
        EngineUnavailableError: If it fails here.
    """
    acting = asyncio.ensure_future(in_own_thread(act, name=_THREAD))
    told = asyncio.ensure_future(telling)
    try:
        await asyncio.wait([acting, told], return_when=asyncio.FIRST_EXCEPTION)
        if told.done():
            told.result()
        done = acting.result() if acting.done() else await acting
        await told
        return done
    except (RuntimeError, ValueError) as error:
        raise EngineUnavailableError(f"{of}: broadcast failed: {' '.join(str(error).split())[:300]}") from error
    finally:
        for task in (acting, told):
            task.cancel()
        await asyncio.gather(acting, told, return_exceptions=True)


def own_host(address: str) -> str:
    """Return the address under which a server reaches this process."""
    parts = urlsplit(address)
    family, kind, *_, where = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        host: str = probe.getsockname()[0]
    return host
