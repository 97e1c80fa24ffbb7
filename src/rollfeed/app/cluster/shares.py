"""From settings to rollout workers: what each of them is given of the run."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rollfeed.app.cluster.engine import ClusterEngine
from rollfeed.app.cluster.worker_places import RolloutWorkers
from rollfeed.cluster import Hosting, wanted_of_nodes
from rollfeed.cluster.ray_hosting import RayHosting, Resources
from rollfeed.config import ClusterKind, Precision, RunSpec, Settings
from rollfeed.config.paths import expand_path
from rollfeed.protocols import Engine

_EMBEDDED_MODULES = ("torch", "safetensors")


def cluster_engine(spec: RunSpec, like: Engine, *, hosting: Hosting | None = None) -> Engine:
    """Return the engine of a run: that of its rollout workers, or ``like``, not started, where there are none.

    ``hosting`` says where workers are, by default as ``[cluster]`` does.
    """
    settings = spec.settings
    if settings.cluster.kind is ClusterKind.LOCAL or not settings.needs_engine:
        return like
    hosting = hosting or RayHosting(
        settings.cluster,
        needs=wanted_of_nodes(
            modules=_EMBEDDED_MODULES if settings.engine.is_embedded else (), folders=_model_folders(settings)
        ),
        per_worker=Resources(settings.cluster.cpus_per_worker, gpus_per_worker(settings)),
    )
    number = settings.cluster.num_workers or settings.num_servers
    return ClusterEngine(
        RolloutWorkers(hosting, settings.cluster, spec_of=partial(worker_spec, spec), num_workers=number), like
    )


def settings_here(settings: Settings) -> Settings:
    """Return what the engine that only stands for the workers' is made of: it needs no GPU and starts no server."""
    engine, changed = settings.engine, dict[str, Any]()
    if settings.cluster.kind is ClusterKind.LOCAL:
        return settings
    if engine.launch is not None:
        there = tuple(f"http://127.0.0.1:{number + 1}" for number in range(engine.launch.count))
        changed = {"launch": None, **{name: each.at(there) for name, each in engine.servers.items()}}
    elif engine.is_embedded and engine.device != "cpu":
        changed = {"device": "cpu", "precision": Precision.AUTO}
    return settings.model_copy(update={"engine": engine.model_copy(update=changed)})


def gpus_per_worker(settings: Settings) -> float | None:
    """Return how many of Ray's GPUs a worker gets; None is one where nodes have some."""
    given, launch = settings.cluster.gpus_per_worker, settings.engine.launch
    if given is not None:
        return given
    if launch is not None:
        if launch.gpus_per_server is None:
            return None
        num_servers = math.ceil(launch.count / (settings.cluster.num_workers or launch.count))
        return float(num_servers * launch.gpus_per_server)
    return float(settings.engine.is_embedded and settings.engine.device.startswith("cuda"))


def worker_spec(spec: RunSpec, number: int, num_workers: int) -> RunSpec:
    """Return what one of ``num_workers`` workers is built from: the run with its share of the engine."""
    settings, engine = spec.settings, spec.settings.engine
    changed: dict[str, Any] = {}
    launch, port = engine.launch, None if engine.launch is None else engine.launch.port
    if launch is not None:
        shares = [len(range(each, launch.count, num_workers)) for each in range(num_workers)]
        port = None if port is None else port + sum(shares[:number])
        changed["launch"] = launch.model_copy(update={"num_servers": shares[number], "port": port})
    for name, servers in engine.servers.items():
        share = servers if launch is not None else servers.at(servers.addresses[number::num_workers])
        bounds = {key: getattr(share, key) for key in ("concurrency", "max_concurrency", "max_connections")}
        changed[name] = share.model_copy(
            update={key: math.ceil(bound / num_workers) for key, bound in bounds.items() if bound is not None}
        )
    most = settings.rollout.max_requests_in_flight
    rollout = settings.rollout.model_copy(
        update={"max_requests_in_flight": None if most is None else math.ceil(most / num_workers)}
    )
    update = {"engine": engine.model_copy(update=changed), "rollout": rollout}
    return replace(spec, settings=settings.model_copy(update=update))


def _model_folders(settings: Settings) -> tuple[str, ...]:
    """Return the folder of the model, where it is named by one."""
    named = Path(expand_path(settings.model.checkpoint))
    return (str(named),) if named.is_absolute() and named.is_dir() and settings.engine.needs_weights else ()
