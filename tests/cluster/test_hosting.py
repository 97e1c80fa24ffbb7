"""Hosted objects, calls that are spread over hosts, and what is asked of nodes; without Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from rollfeed import __version__
from rollfeed.cluster import Host, HostDiedError, Hosted, NodeNeeds, ray_hosting, wanted_of_nodes
from rollfeed.cluster.hosting import returned
from rollfeed.cluster.node_checks import node_probe
from rollfeed.cluster.ray_hosting import RayHosting, Resources
from rollfeed.cluster.remote_workers import RemoteWorkers
from rollfeed.config import ClusterKind, ClusterSettings
from rollfeed.errors import ConfigError, RunFailedError, WorkerTimeoutError

RAY = ClusterSettings(kind=ClusterKind.RAY)


class Part:
    """An object that is hosted."""

    def __init__(self, start: int) -> None:
        self._sum = start

    async def add(self, number: int) -> int:
        self._sum += number
        return self._sum

    async def refuse(self) -> None:
        raise ConfigError("no such model")

    async def break_down(self) -> None:
        raise KeyError("left")


def test_a_hosted_object_answers_and_its_errors_are_ours_again() -> None:
    async def main() -> None:
        hosted = Hosted(f"{Path(__file__)}:Part", 3)
        assert returned(await hosted.call("add", 4)) == 7
        assert returned(await hosted.call("add", 1)) == 8
        with pytest.raises(ConfigError, match="no such model"):
            returned(await hosted.call("refuse"))
        with pytest.raises(RunFailedError, match="KeyError: 'left'"):
            returned(await hosted.call("break_down"))

    asyncio.run(main())


class Canned(Host):
    """A host that answers with its name, raises, or has died."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name = name
        self.asked: list[tuple[Any, ...]] = []
        self._error = error

    async def call(self, method: str, *args: Any) -> Any:
        self.asked.append((method, *args))
        await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        return self.name

    def kill(self) -> None: ...


def test_calls_go_to_the_least_busy_host_and_from_a_dead_one_to_another() -> None:
    async def main() -> None:
        hosts = [Canned("a"), Canned("b")]
        workers = RemoteWorkers(hosts)
        asked = (workers.call("module.f", [1], deadline_seconds=2.0, cached=True) for _ in range(4))
        assert sorted(await asyncio.gather(*asked)) == ["a", "a", "b", "b"]
        assert hosts[0].asked[0] == ("call", "module.f", [1], 2.0, True)
        workers = RemoteWorkers([Canned("a", HostDiedError("a is gone")), Canned("b")])
        asked = (workers.call("module.f", [], deadline_seconds=2.0) for _ in range(2))
        assert await asyncio.gather(*asked) == ["b", "b"]
        workers = RemoteWorkers([Canned("a", WorkerTimeoutError("too slow"))])
        with pytest.raises(WorkerTimeoutError):
            await workers.call("module.f", [], deadline_seconds=2.0)

    asyncio.run(main())


def test_a_node_that_lacks_something_says_what(tmp_path: Path) -> None:
    probe, wanted = node_probe(), wanted_of_nodes(modules=["json"], folders=[str(tmp_path)])
    assert probe(*wanted) is None
    assert __version__ in (probe(*wanted._replace(rollfeed="0.0.1")) or "")
    assert "protocol 99" in (probe(*wanted._replace(protocol=99)) or "")
    assert "has Python" in (probe(*wanted._replace(python=(3, 1))) or "")
    assert "lacks the Python module not_there" in (probe(*wanted._replace(modules=("not_there",))) or "")
    assert "has no folder /not/there" in (probe(*wanted._replace(folders=("/not/there",))) or "")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_the_extra_one_line_has_the_command() -> None:
    hosting = RayHosting(RAY, needs=NodeNeeds("", 1, (3, 11), (), ()), per_worker=Resources(1.0, 0.0))
    with pytest.raises(ConfigError, match=r"pip install 'rollfeed\[ray\]'"):
        asyncio.run(hosting.__aenter__())


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_an_address_at_which_something_else_listens_is_refused(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_hosting, "_CONNECT_SECONDS", 60.0 if answer is not None else 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            accepted, _ = server.accept()
            with accepted:
                accepted.recv(1)
                accepted.sendall(answer or b"")

        thread = threading.Thread(target=serve)
        if answer is not None:
            thread.start()
        with pytest.raises(ConfigError, match="no cluster answers there"):
            ray_hosting._check_reachable(f"127.0.0.1:{port}", "cluster.address")
        if answer is not None:
            thread.join()
