"""``[cluster]``: where the work of a run is done."""

from __future__ import annotations

import re
from enum import StrEnum

from pydantic import Field, field_validator

from rollfeed.config.section import Resume, Section

_ADDRESS = re.compile(r"auto|local|(ray://)?(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):\d{1,5}")


def is_cluster_address(text: str) -> bool:
    """Whether a text can be the address of a Ray cluster."""
    return _ADDRESS.fullmatch(text) is not None


class ClusterKind(StrEnum):
    """The machines that answer and score a run's prompts."""

    LOCAL = "local"
    """This process and those that it starts."""
    RAY = "ray"
    """Actors on the nodes of a Ray cluster."""


class TrainerPlace(StrEnum):
    """The process that trains, in `rollfeed train` on a cluster."""

    ACTOR = "actor"
    """One of its own, on a node with room for it."""
    DRIVER = "driver"
    """That of the run."""


class ClusterSettings(Section, resume=Resume.FREE):
    """Rollout workers on the nodes of a cluster; this process keeps the ledger, the prompts and the run directory.

    See [cluster.md](cluster.md). Batches of a deterministic run are the same with and without it.
    """

    kind: ClusterKind = Field(default=ClusterKind.LOCAL, strict=False)
    """`local` does everything on this machine; `ray` needs `pip install 'rollfeed[ray]'` here and on the nodes."""
    address: str | None = None
    """Of the Ray cluster: `auto` for the one that this machine is a node of, `host:6379` or `ray://host:10001`; `local`
    starts one that ends with the run. By default that of the variable `RAY_ADDRESS`, without it `local`.
    """
    num_workers: int | None = Field(default=None, ge=1, le=10_000)
    """Rollout workers, each an actor with its share of the engine: of the servers that are named or launched, or an
    embedded engine of its own. By default one a server; with the embedded engine one a node.
    """
    cpus_per_worker: float = Field(default=1.0, ge=0.0, le=4096.0, strict=False)
    """Of Ray's CPUs, for a worker with its graders and environments."""
    gpus_per_worker: float | None = Field(default=None, ge=0.0, le=64.0, strict=False)
    """Of Ray's GPUs, all on one node. By default as many as its launched servers split their models over, without
    `engine.launch.gpus_per_server` one where nodes have some; one for an embedded engine on `cuda`, and none otherwise.
    """
    reward_workers: int = Field(default=0, ge=0, le=10_000)
    """Actors that graders' and environments' calls of all rollout workers are spread over, with
    `reward.workers.num_workers` processes each; by default each rollout worker has such processes on its own node.
    """
    trainer: TrainerPlace = Field(default=TrainerPlace.ACTOR, strict=False)
    """Where `rollfeed train` trains: an `actor` on a node that has room for it, or the `driver`, which is this process.
    Checkpoints are in the run directory either way.
    """
    trainer_cpus: float = Field(default=1.0, ge=0.0, le=4096.0, strict=False)
    """Of Ray's CPUs, for the trainer's actor; how many threads it takes, `train.threads` says."""
    trainer_gpus: float | None = Field(default=None, ge=0.0, le=1.0, strict=False)
    """Of Ray's GPUs, for the trainer's actor. By default one where `train.device` is `cuda`, or `auto` and nodes have
    GPUs; none otherwise.
    """
    startup_timeout_seconds: float = Field(default=120.0, gt=0.0, le=86_400.0, strict=False)
    """For the cluster to answer and a first worker to be ready, and for a worker to come back where none is left."""
    answer_timeout_seconds: float = Field(default=1200.0, gt=0.0, le=86_400.0, strict=False)
    """For a rollout worker to do what it is told, such as to take new weights; one that takes longer is replaced. Above
    `update_timeout_seconds` of the servers.
    """

    @property
    def has_trainer_actor(self) -> bool:
        """Whether `rollfeed train` trains in a process of its own, which may be on another machine."""
        return self.kind is not ClusterKind.LOCAL and self.trainer is not TrainerPlace.DRIVER

    @field_validator("address", mode="after")
    @classmethod
    def _address_is_one(cls, given: str | None) -> str | None:
        if given is not None and not is_cluster_address(given):
            raise ValueError(f"{given!r} is no address: write auto, local, host:6379 or ray://host:10001")
        return given
