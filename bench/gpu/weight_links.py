"""Ways of weights between two processes on GPUs, without a server: handles to memory, NCCL alone, and NCCL in a group.

::

    python bench/gpu/weight_links.py --output bench/gpu/weight_links.json [--gibibytes 3.2] [--only handles nccl]

``nccl`` and ``group`` need two GPUs. The other process does what SGLang (0.5.23) or vLLM (0.32) does there, with
PyTorch alone: it maps the name of a GPU to its number, opens the memory, copies it and sums it up. ``group`` ends with
a receiver that is killed: the broadcast has to raise, and this process to live.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import multiprocessing
import os
import pickle
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from rollfeed.base.tensor_buckets import TensorBucket, bucket_text, make_buckets, with_gpu_name
from rollfeed.base.update_group import UpdateGroup, connect, listen
from rollfeed.weights.transports.communicator import Communicator, unique_id
from rollfeed.weights.transports.nccl import BUCKET_BYTES
from rollfeed.weights.transports.tensors import shared_bucket

TIMES = 5
NAME = "rollfeed-bench"
KILLED_SECONDS = 20.0


def checksum(bytes_B: torch.Tensor) -> int:
    """Sum of the bytes, each with its place modulo 251."""
    places_B = torch.arange(len(bytes_B), device=bytes_B.device) % 251 + 1
    return int((bytes_B.long() * places_B).sum())


def gpu_number(name: str | int) -> int:
    if isinstance(name, int):
        return name
    uuids = [str(torch.cuda.get_device_properties(each).uuid) for each in range(torch.cuda.device_count())]
    return uuids.index(name)


def rebuild(*arguments: Any) -> torch.Tensor:
    return reductions.rebuild_cuda_tensor(*with_gpu_name(arguments, gpu_number(arguments[6])))


class ServerUnpickler(pickle.Unpickler):
    """As SGLang's, once it has patched PyTorch."""

    def find_class(self, module: str, name: str) -> Any:
        return rebuild if name == "rebuild_cuda_tensor" else super().find_class(module, name)


def read_handles(pipe: Connection) -> None:
    while (text := pipe.recv()) is not None:
        content = ServerUnpickler(io.BytesIO(base64.b64decode(text))).load()
        copied = content["flattened_tensor"].clone()
        torch.cuda.synchronize()
        pipe.send("done")
        pipe.send((checksum(copied), [entry.name for entry in content["metadata"]]))
        del content


def read_vllm_handles(pipe: Connection) -> None:
    while (info := pipe.recv()) is not None:
        ((name, arguments),) = pickle.loads(base64.b64decode(info["ipc_handles_pickled"])).items()
        packed_B = reductions.rebuild_cuda_tensor(*with_gpu_name(arguments, gpu_number(name)))
        copied = packed_B[: sum(info["tensor_sizes"])].clone()
        torch.cuda.synchronize()
        pipe.send("done")
        pipe.send((checksum(copied), info["names"]))
        del packed_B


def receive_nccl(pipe: Connection) -> None:
    device = torch.device("cuda:1")
    communicator = Communicator(pipe.recv(), num_ranks=2, rank=1, device=device)
    communicator.try_out()
    while (size := pipe.recv()) is not None:
        bytes_B = torch.empty(size, dtype=torch.uint8, device=device)
        communicator.broadcast(bytes_B)
        pipe.send("done")
        pipe.send((checksum(bytes_B), []))


def receive_group(pipe: Connection) -> None:
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    torch.cuda.set_device(1)
    store = connect("127.0.0.1", pipe.recv(), timeout_seconds=60.0)
    group = UpdateGroup(store, NAME, backend="nccl", rank=1, world_size=2, timeout_seconds=60.0)
    while (size := pipe.recv()) is not None:
        bytes_B = torch.empty(size, dtype=torch.uint8, device="cuda:1")
        group.broadcast(bytes_B)
        pipe.send("done")
        pipe.send((checksum(bytes_B), []))


def start(target: Callable[[Connection], None]) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there,), daemon=True)
    process.start()
    there.close()
    return here, process


def measured(pipe: Connection, buckets: list[TensorBucket], send: Callable[[TensorBucket], None]) -> dict[str, Any]:
    """Send all buckets several times; seconds for all of them, and whether all bytes have arrived."""
    expected, seconds = [checksum(bucket.bytes_B) for bucket in buckets], []
    for _ in range(TIMES):
        total = 0.0
        for bucket, sum_there in zip(buckets, expected, strict=True):
            began = time.perf_counter()
            send(bucket)
            pipe.recv()
            total += time.perf_counter() - began
            found, names = pipe.recv()
            assert found == sum_there, "other bytes have arrived"
            assert names in ([], list(bucket.names))
        seconds.append(total)
    num_bytes = sum(bucket.bytes_B.nbytes for bucket in buckets)
    median = statistics.median(seconds)
    return {"bytes": num_bytes, "seconds": seconds, "gigabytes_per_second": num_bytes / median / 1e9}


def by_handles(buckets: list[TensorBucket]) -> dict[str, Any]:
    pipe, _ = start(read_handles)
    return measured(pipe, buckets, lambda bucket: pipe.send(bucket_text(bucket)))


def by_vllm_handles(buckets: list[TensorBucket]) -> dict[str, Any]:
    pipe, _ = start(read_vllm_handles)
    return measured(pipe, buckets, lambda bucket: pipe.send(shared_bucket(bucket)))


def by_nccl(buckets: list[TensorBucket]) -> dict[str, Any]:
    pipe, _ = start(receive_nccl)
    group = unique_id()
    pipe.send(group)
    sender = Communicator(group, num_ranks=2, rank=0, device=torch.device("cuda:0"))
    sender.try_out()

    def send(bucket: TensorBucket) -> None:
        pipe.send(len(bucket.bytes_B))
        sender.broadcast(bucket.bytes_B)

    return measured(pipe, buckets, send)


def by_group(buckets: list[TensorBucket]) -> dict[str, Any]:
    pipe, process = start(receive_group)
    store = listen("127.0.0.1", timeout_seconds=60.0)
    pipe.send(store.port)
    group = UpdateGroup(store, NAME, backend="nccl", rank=0, world_size=2, timeout_seconds=KILLED_SECONDS)

    def send(bucket: TensorBucket) -> None:
        pipe.send(len(bucket.bytes_B))
        group.broadcast(bucket.bytes_B)

    found = measured(pipe, buckets, send)
    process.kill()
    process.join()
    began = time.perf_counter()
    try:
        group.broadcast(buckets[0].bytes_B)
    except Exception as error:
        found["to_a_killed_receiver"] = f"{type(error).__name__}: {error}"[:300]
    else:
        found["to_a_killed_receiver"] = "nothing was raised"
    found["seconds_until_raised"] = time.perf_counter() - began
    group.leave()
    return found


PARTS = {"handles": by_handles, "vllm_handles": by_vllm_handles, "nccl": by_nccl, "group": by_group}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--gibibytes", type=float, default=3.2)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    arguments = parser.parse_args()
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    random = torch.Generator(device="cuda:0").manual_seed(0)
    count = max(2, int(arguments.gibibytes * (1 << 30) / 2 / (1 << 24)))
    tensors = [(f"layer.{i}", torch.randn(1 << 24, generator=random, device="cuda:0").bfloat16()) for i in range(count)]
    tensors += [("norm", torch.ones(7, device="cuda:0")), ("byte", torch.ones(3, dtype=torch.uint8, device="cuda:0"))]
    buckets = list(make_buckets(tensors, most_bytes=BUCKET_BYTES))
    torch.cuda.synchronize()
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "buckets": len(buckets)}
    for name in arguments.only:
        if name in ("nccl", "group") and torch.cuda.device_count() < 2:
            found[name] = "needs two GPUs"
            continue
        try:
            found[name] = PARTS[name](buckets)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        print(name, found[name], flush=True)
        arguments.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
