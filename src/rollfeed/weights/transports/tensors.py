"""Weights for servers on this host: handles to the memory of a GPU, or the bytes themselves.

SGLang takes buckets inside a session (``/update_weights_from_tensor``), vLLM in four phases with its ``ipc`` backend
(``vllm/distributed/weight_transfer/ipc_engine.py`` of 0.32), from a GPU only. A copy of the weights stays here until
the next version: a server that comes back is given them again.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch
from torch.multiprocessing import reductions

from rollfeed.base.tensor_buckets import TensorBucket, bucket_text
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Command, MetServer, TransportContext
from rollfeed.types import TensorUpdate, WeightUpdate
from rollfeed.weights.transports.staging import Staging, vllm_session, weight_session

_VLLM = (
    "start vLLM 0.32 with VLLM_SERVER_DEV_MODE=1, VLLM_ALLOW_INSECURE_SERIALIZATION=1 and "
    """--weight-transfer-config '{"backend": "ipc"}'"""
)


class TensorTransport:
    """Fits :class:`rollfeed.protocols.WeightTransport`: servers on this host read the tensors of this process."""

    def __init__(self, context: TransportContext) -> None:
        self._is_vllm = context.kind == "openai"
        self._staging = Staging(context)

    def meet(self, servers: Sequence[MetServer]) -> None:
        self._staging.meet(servers)
        for server in servers:
            if self._is_vllm and server.num_ranks > 1:
                raise EngineProtocolError(
                    f"{server.address}: spread over {server.num_ranks} GPUs, and vLLM reads tensors on their own GPU "
                    'only: set engine.openai.weights_transport = "nccl"'
                )

    async def stage(self, update: TensorUpdate) -> WeightUpdate:
        if torch.cuda.is_available():  # memory of earlier updates, which every reader has let go
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        buckets = await self._staging.buckets(update)
        is_on_gpu = buckets[0].bytes_B.is_cuda
        if self._is_vllm:
            if not is_on_gpu:
                raise EngineProtocolError(
                    "vLLM reads tensors of a GPU only, and these are in the memory of the processor: set "
                    'engine.openai.weights_transport = "disk"'
                )
            return VLLMTensors(buckets, policy_version=update.policy_version)
        texts = None if is_on_gpu else await asyncio.to_thread(lambda: tuple(map(bucket_text, buckets)))
        return SGLangTensors(self._staging, buckets, texts, policy_version=update.policy_version)

    def close(self) -> None:
        """Do nothing: no file is left."""


@dataclass(frozen=True, slots=True, eq=False)
class SGLangTensors(WeightUpdate):
    """Buckets, and for those in the processor's memory the texts that have their bytes."""

    staging: Staging
    buckets: tuple[TensorBucket, ...]
    texts: tuple[str, ...] | None

    async def prepare(self, address: str, command: Command) -> int:
        if self.texts is None:
            await asyncio.to_thread(check_is_here, address)
        return 0

    async def load(self, address: str, command: Command) -> int:
        num_ranks, moved = self.staging.num_ranks(address), 0
        async with weight_session(address, command):
            for index, bucket in enumerate(self.buckets):
                # A handle is for one reader: each rank has its own.
                texts = [bucket_text(bucket) if self.texts is None else self.texts[index] for _ in range(num_ranks)]
                body = {"serialized_named_tensors": texts, "load_format": "flattened_bucket", "flush_cache": False}
                if index == len(self.buckets) - 1:
                    body["weight_version"] = str(self.policy_version)
                try:
                    await command("/update_weights_from_tensor", body)
                except EngineProtocolError as error:
                    if index:
                        raise EngineUnavailableError(f"{address}: has some of the new weights: {error}") from error
                    raise
                moved += bucket.bytes_B.nbytes if self.texts is None else sum(map(len, texts))
        return moved


@dataclass(frozen=True, slots=True, eq=False)
class VLLMTensors(WeightUpdate):
    """Buckets in the memory of a GPU, for vLLM's workers on it."""

    buckets: tuple[TensorBucket, ...]

    async def prepare(self, address: str, command: Command) -> int:
        await asyncio.to_thread(check_is_here, address)
        try:
            await command("/init_weight_transfer_engine", {"init_info": {"packed": True}})
        except (EngineProtocolError, EngineUnavailableError) as error:
            raise type(error)(f"{error}: {_VLLM}") from error
        return 0

    async def load(self, address: str, command: Command) -> int:
        async with vllm_session(address, command, policy_version=self.policy_version):
            for bucket in self.buckets:
                await command("/update_weights", {"update_info": shared_bucket(bucket)})
        return sum(bucket.bytes_B.nbytes for bucket in self.buckets)


def shared_bucket(bucket: TensorBucket) -> dict[str, object]:
    """Return what vLLM's packed form says of a bucket: where it is, by the name of the GPU, and what is in it."""
    _, arguments = reductions.reduce_tensor(bucket.bytes_B)  # type: ignore[no-untyped-call]
    gpu = str(torch.cuda.get_device_properties(bucket.bytes_B.device).uuid)
    return {
        "names": list(bucket.names),
        "dtype_names": bucket.dtype_names,
        "shapes": [list(shape) for shape in bucket.shapes],
        "tensor_sizes": bucket.sizes,
        "ipc_handles_pickled": base64.b64encode(pickle.dumps({gpu: arguments})).decode(),
    }


def check_is_here(address: str) -> None:
    """Raise EngineProtocolError if a server's address is none of this host: a handle to memory could end it."""
    host = urlsplit(address).hostname or ""
    try:
        places = {(family, where) for family, kind, *_, where in socket.getaddrinfo(host, 0) if kind}
    except OSError as error:
        raise EngineProtocolError(f"{address}: {error}") from error
    for family, where in places:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind(where)
            except OSError:
                continue
            return
    raise EngineProtocolError(
        f"{address}: is not on this host, where the tensors are: set weights_transport to nccl, delta or disk"
    )
