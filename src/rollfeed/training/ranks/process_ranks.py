"""The processes that train one model together, and what they tell each other beside gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rollfeed.errors import RunFailedError


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together; alone by default.

    What is said here must be said by all of them, in the same order: each waits for the others.
    """

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    """Of this one's part of the model, where there are several."""

    @classmethod
    def join(cls, device: torch.device, *, timeout_seconds: float) -> Ranks:
        """Join the others as the environment names them, which is that of torchrun.

        Whoever waits longer than ``timeout_seconds`` for another one fails.
        """
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def everybodys(self, value: Any) -> list[Any]:
        """Return what each of them says, in their order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def check_alike(self, facts: Mapping[str, str]) -> None:
        """Refuse to train with others that are not like this one; ``facts`` are digests by what they are of.

        Raises:
            RunFailedError: If they differ; all of them raise the same.
        """
        told = self.everybodys(dict(facts))
        for name in facts:
            said = [each.get(name) for each in told]
            if other := [rank for rank, each in enumerate(said) if each != said[0]]:
                raise RunFailedError(
                    f"train.num_processes = {self.size}: the processes do not agree on {name}: {said[0]} in rank 0 and "
                    f"{said[other[0]]} in rank {other[0]}: give them the same settings, files and packages"
                )


ALONE = Ranks()
