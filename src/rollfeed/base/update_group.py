"""A process group of PyTorch between one that publishes weights and the processes of a server, as SGLang makes it.

It is apart from the groups of a distributed training. Rank 0 publishes.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

_FAILING = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}
"""Without these a broadcast to a server that has died ends this process, and with them it raises."""


def listen(host: str, *, timeout_seconds: float) -> TCPStore:
    """Return a store on a free port of ``host``, where the ranks of a group find each other."""
    return TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds), multi_tenant=True
    )


def connect(host: str, port: int, *, timeout_seconds: float) -> TCPStore:
    """Return the store that somebody else listens with."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds))


class _FailingSoftly:
    """Variables that groups look for while they are made; several may be at a time, each in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_within = 0
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        with self._lock:
            self._num_within += 1
            if self._num_within == 1:
                self._before = {name: os.environ.get(name) for name in _FAILING}
                os.environ.update(_FAILING)

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._num_within -= 1
            if self._num_within:
                return
            for name, value in self._before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


_FAILING_SOFTLY = _FailingSoftly()


class UpdateGroup:
    """A group once all of its ranks have joined; making it blocks, and raises RuntimeError after the timeout."""

    def __init__(
        self, store: c10d.Store, name: str, *, backend: str, rank: int, world_size: int, timeout_seconds: float
    ) -> None:
        # PyTorch has no public way to a group beside the default one; slime, OpenRLHF and SGLang go this one.
        with _FAILING_SOFTLY:
            group: dist.ProcessGroup = c10d._new_process_group_helper(
                world_size,
                rank,
                [],
                c10d.Backend(backend),
                c10d.PrefixStore(name, store),
                group_name=c10d.GroupName(name),
                timeout=timedelta(seconds=timeout_seconds),
            )[0]
        c10d._world.pg_group_ranks[group] = {each: each for each in range(world_size)}
        self._groups = [group]

    def broadcast(self, bytes_B: torch.Tensor) -> None:
        """Send from rank 0, or receive there. Blocks, and raises RuntimeError if a rank is gone."""
        if not self._groups:
            raise RuntimeError("the group has been left")
        dist.broadcast(bytes_B, src=0, group=self._groups[0])
        if bytes_B.is_cuda:
            torch.cuda.synchronize(bytes_B.device)

    def leave(self) -> None:
        """Give the group up, whatever state it is in, also while a broadcast is under way."""
        while self._groups:  # connections are closed when nobody has it any more
            group = self._groups.pop()
            with suppress(RuntimeError, ValueError, AttributeError):
                group.abort()
            with suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(group)
