"""A broadcast that fails in its middle, once."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch

from rollfeed.protocols import Command
from rollfeed.types import TensorUpdate
from rollfeed.weights.transports.nccl import BroadcastTransport, Sender, SGLangBroadcast


class Stumbler:
    """Fails while the server waits for a bucket."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def broadcast(self, bytes_B: torch.Tensor) -> None:
        time.sleep(0.3)
        raise RuntimeError("a cable was pulled")

    def leave(self) -> None:
        self._sender.leave()


class Stumbling(SGLangBroadcast):
    """Joins a group that fails, and sound ones from then on."""

    stumbled: ClassVar[set[int]] = set()

    async def _join(self, address: str, command: Command, name: str) -> Sender:
        sender = await SGLangBroadcast._join(self, address, command, name)
        if self.policy_version in self.stumbled:
            return sender
        self.stumbled.add(self.policy_version)
        return Stumbler(sender)


async def stumbling(transport: BroadcastTransport, update: TensorUpdate) -> Stumbling:
    """Stage an update that fails at the first server that is told of it."""
    staged: Any = await transport.stage(update)
    return Stumbling(staged.staging, staged.links, staged.buckets, staged.number, policy_version=update.policy_version)
