"""Hosts as actors of Ray, on the nodes of a cluster that is there or is started for the run.

Ray is imported when a cluster is entered, never before. What is made belongs to this process's job: it ends with it,
however that ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rollfeed.base.waiting import call_in_own_thread
from rollfeed.cluster.hosting import Host, HostDiedError, Hosted, Hosting, returned
from rollfeed.cluster.node_checks import NodeNeeds, node_probe
from rollfeed.config import ClusterSettings
from rollfeed.config.cluster import is_cluster_address
from rollfeed.errors import ConfigError, RunFailedError, in_one_line
from rollfeed.types.text import counted

_log = logging.getLogger(__name__)
_CONNECT_SECONDS = 5.0
_PROBE_SECONDS = 30.0
_CALLS_AT_ONCE = 10_000
_LOCAL = "local"
_OF_CLIENT_SERVERS = (
    "; start the cluster's head with GRPC_ENABLE_FORK_SUPPORT=0, or run on one of its nodes with cluster.address = "
    "host:6379 or `ray job submit`"
)
"""Ray's client server forks a process for each client in the middle of gRPC's calls, and some of them hang."""
_NODE_LABEL = "ray.io/node-id"
_ROLLOUT_WORKER = "rollout worker"
TRAINER = "trainer"
_FEWER = {TRAINER: "trainer_gpus or trainer_cpus"}
"""What helps where there is no room."""
_SETTINGS_FRAME = b"\4"
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS_FRAME + bytes(5)
"""With empty settings; servers of gRPC answer with theirs, in a frame of the same type (RFC 9113, 3.4)."""


class Resources(NamedTuple):
    """The share of a node that a worker in a place gets, in Ray's units."""

    cpus: float
    gpus: float | None
    """None is one where nodes have some."""


class RayHost(Host):
    """An actor."""

    def __init__(self, actor: Any, name: str) -> None:
        self.name = name
        self._actor = actor

    async def call(self, method: str, *args: Any) -> Any:
        import ray

        answer = asyncio.ensure_future(self._actor.call.remote(method, *args))
        # Ray's client prints a stack where somebody no longer waits.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return returned(await asyncio.shield(answer))
        except ray.exceptions.RayError as error:
            raise HostDiedError(f"{self.name}: {in_one_line(error)}") from None

    def kill(self) -> None:
        import ray

        try:
            ray.kill(self._actor, no_restart=True)
        except Exception as error:  # it is gone, or the cluster is
            _log.debug("%s cannot be killed: %s", self.name, error)


class RayHosting(Hosting):
    """Hosts on the nodes of a Ray cluster that have what the run needs."""

    def __init__(
        self, settings: ClusterSettings, *, needs: NodeNeeds, per_worker: Resources, what: str = _ROLLOUT_WORKER
    ) -> None:
        self._what = what
        self._settings = settings
        self._needs = needs
        self._per_worker = per_worker
        self._group: Any = None
        self._hosts: list[RayHost] = []
        self._refused: list[str] = []
        self._num_nodes = 0
        self._session: Path | None = None
        """The folder of a cluster that was started here."""

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    async def __aenter__(self) -> RayHosting:
        """Connect, and find out which nodes can be used.

        Raises:
            ConfigError: If there is no Ray here, no cluster at the address, or no node that has what is needed.
        """
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"cluster.kind = 'ray' needs {error.name}, which is not installed: pip install 'rollfeed[ray]'"
            ) from None
        self._is_own = not ray.is_initialized()
        if self._is_own:
            await self._connect()
        try:
            await self._check_nodes()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.shield(asyncio.to_thread(self._leave))

    async def reserve(self, num_places: int) -> None:
        from ray.util.placement_group import placement_group

        per_worker = self._per_worker
        bundle = {name: amount for name, amount in (("CPU", per_worker.cpus), ("GPU", per_worker.gpus)) if amount}
        if not bundle:
            return
        elsewhere = [{_NODE_LABEL: f"!in({','.join(self._refused)})"}] * num_places if self._refused else None
        self._group = await asyncio.to_thread(
            placement_group, [bundle] * num_places, strategy="SPREAD", bundle_label_selector=elsewhere
        )
        seconds = self._settings.startup_timeout_seconds
        if not await asyncio.to_thread(self._group.wait, seconds):
            raise RunFailedError(
                f"cluster: there is no room for {counted(num_places, self._what)} of {bundle} within "
                f"cluster.startup_timeout_seconds = {seconds:g}; the nodes have {await asyncio.to_thread(_free)} free: "
                f"lower cluster.{_FEWER.get(self._what, 'num_workers')}, or add nodes"
            )

    async def start(self, factory: str, *args: Any, place: int | None) -> RayHost:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": _CALLS_AT_ONCE, "max_restarts": 0}
        if place is None:  # nobody watches over it: Ray starts it again, on another node where its own is gone
            options |= {"scheduling_strategy": "SPREAD", "num_cpus": self._per_worker.cpus, "max_restarts": -1}
        else:
            options |= {"num_cpus": self._per_worker.cpus, "num_gpus": self._per_worker.gpus}
        if place is not None and self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=place
            )
        elif self._refused:
            options["label_selector"] = {_NODE_LABEL: f"!in({','.join(self._refused)})"}
        made = await asyncio.to_thread(lambda: ray.remote(Hosted).options(**options).remote(factory, *args))
        name = f"rollout worker {place}" if self._what == _ROLLOUT_WORKER else self._what
        host = RayHost(made, f"reward worker of {factory}" if place is None else name)
        self._hosts.append(host)
        return host

    def share(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    async def _connect(self) -> None:
        import ray

        name, address = "cluster.address", self._settings.address
        if address is None:
            name, address = "the variable RAY_ADDRESS", os.environ.get("RAY_ADDRESS") or _LOCAL
        named = f"{name} = {address!r}"
        if not is_cluster_address(address):
            raise ConfigError(f"{named}: no address of a cluster; set cluster.address to auto, local or host:6379")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        await asyncio.to_thread(_check_reachable, address, named)
        logging.getLogger("ray").setLevel(logging.ERROR)  # it would tell of its thread, and of each restart
        options: dict[str, Any] = {"include_dashboard": False} if address == _LOCAL else {}
        connect = partial(ray.init, address=address, log_to_driver=False, configure_logging=False, **options)
        try:
            if address == _LOCAL:
                # In a thread that stays: Linux ends Ray's processes with the thread that has started them.
                self._session = Path((await asyncio.to_thread(connect)).address_info["session_dir"])
            else:
                await self._join(connect, named)
        except ConfigError:
            raise
        except Exception as error:  # Ray raises many kinds
            said = in_one_line(error) + _OF_CLIENT_SERVERS * address.startswith("ray://")
            raise ConfigError(f"{named}: {said}") from error
        if threading.current_thread() is threading.main_thread():
            # Ray has put a handler before ours, which prints a stack.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            signal.siginterrupt(signal.SIGTERM, False)

    async def _join(self, connect: Callable[[], Any], named: str) -> None:
        """Connect to a cluster, which may never answer: nobody waits for that thread then."""
        seconds = self._settings.startup_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                _, error = await call_in_own_thread(connect, name="ray.init")
        except TimeoutError:
            raise ConfigError(
                f"{named}: the cluster does not answer within cluster.startup_timeout_seconds = {seconds:g}"
            ) from None
        if error is not None:
            raise error

    async def _check_nodes(self) -> None:
        """Find which nodes lack something; they are named, and get no work."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
        probe = ray.remote(node_probe())

        async def problem_of(node: Any) -> str | None:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            try:
                async with asyncio.timeout(_PROBE_SECONDS):
                    asked = probe.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(*self._needs)
                    found: str | None = await asked
                    return found
            except TimeoutError:
                return f"does not answer within {_PROBE_SECONDS:g} s"
            except ray.exceptions.RayError as error:
                return f"cannot run a task: {in_one_line(error)}"

        problems = await asyncio.gather(*map(problem_of, nodes))
        told = []
        for node, problem in zip(nodes, problems, strict=True):
            if problem is not None:
                told.append(f"node {node['NodeManagerHostname']} ({node['NodeID'][:8]}) {problem}")
                _log.warning("cluster: %s; it gets no work", told[-1])
                self._refused.append(node["NodeID"])
        good = [node for node in nodes if node["NodeID"] not in self._refused]
        if self._per_worker.gpus is None:
            some = any(node["Resources"].get("GPU") for node in nodes if node["NodeID"] not in self._refused)
            self._per_worker = self._per_worker._replace(gpus=float(some))
        # A head node often has no CPUs or GPUs to give; where none has enough, `reserve` tells of it.
        self._num_nodes = sum(map(self._has_room, good)) or len(good)
        if not good:
            raise ConfigError(f"cluster: no node can be used: {'; '.join(told) or 'there is none'}")

    def _has_room(self, node: Any) -> bool:
        given, wanted = node["Resources"], self._per_worker
        return bool(given.get("CPU", 0.0) >= wanted.cpus and given.get("GPU", 0.0) >= wanted.gpus)

    def _leave(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        for host in self._hosts:
            host.kill()
        if self._group is not None:
            try:
                remove_placement_group(self._group)
            except Exception as error:  # the cluster is gone
                _log.debug("the placement group cannot be removed: %s", error)
        if self._is_own:
            ray.shutdown()
        if self._session is not None:
            shutil.rmtree(self._session, ignore_errors=True)


def _check_reachable(address: str, named: str) -> None:
    """Refuse an address at which nobody speaks gRPC, as Ray does; Ray itself would try for long."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                connection.sendall(_HTTP2_GREETING)
                if connection.recv(4, socket.MSG_WAITALL)[3:] != _SETTINGS_FRAME:
                    raise ConnectionError("what listens is not Ray")
    except OSError as error:
        raise ConfigError(
            f"{named}: no cluster answers there ({error.strerror or error}); start one with `ray start --head`, or set "
            "cluster.address"
        ) from None


def _free() -> dict[str, float]:
    import ray

    return {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
