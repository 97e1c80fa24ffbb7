"""Deltas over HTTP, to receivers on loopback ports and in processes of their own."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web
from tests.held_ports import held_port
from tests.weights.transports.delta.folders import content_of, tensors_of
from tests.weights.transports.delta.processes import process_at, receiver_at

from rollfeed.base.serving import serve_application
from rollfeed.errors import EngineProtocolError
from rollfeed.protocols import MetServer, TransportContext
from rollfeed.types import FolderUpdate, TensorUpdate
from rollfeed.weights.transports.delta import DeltaTransport

SERVER = "http://127.0.0.1:9"


def transport_to(*receivers: str, folder: Path | None = None, key: str | None = None) -> DeltaTransport:
    context = TransportContext(
        kind="sglang", folder=folder, checkpoint=None, untied_head=False, receivers=receivers, key=key
    )
    return DeltaTransport(context)


async def no_command(path: str, body: Any) -> dict[str, Any]:
    raise AssertionError(path)


async def publish(transport: DeltaTransport, version: int, tensors: Any, *servers: str) -> tuple[list[int], Any]:
    update = await transport.stage(TensorUpdate(tensors, policy_version=version))
    prepared = [update.prepare(server, no_command) for server in servers or (SERVER,)]
    return await asyncio.gather(*prepared), update


def assert_taken(update: FolderUpdate, server: str = SERVER) -> None:
    assert content_of(update.folder_at(server)) == content_of(update.folder)
    assert update.folder_at(server) != update.folder


@pytest.fixture
def transports() -> Iterator[Any]:
    made: list[DeltaTransport] = []

    def make(*receivers: str, **changes: Any) -> DeltaTransport:
        made.append(transport_to(*receivers, **changes))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def test_all_is_sent_once_and_then_what_changes(tmp_path: Path, transports: Any) -> None:
    async with receiver_at(tmp_path / "received") as address:
        transport = transports(address)
        tensors = {"w": torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).bfloat16()}
        (whole,), update = await publish(transport, 1, tensors)
        assert_taken(update)
        tensors["w"] = tensors["w"].clone()
        tensors["w"][::16] += 0.25
        sent, update = await publish(transport, 2, tensors, SERVER, "http://127.0.0.1:10")
        assert_taken(update)
        assert update.folder_at(SERVER) == update.folder_at("http://127.0.0.1:10")
        assert sorted(sent) == [0, max(sent)]  # once, for both servers of the host
        assert max(sent) < whole / 8
        # Again, as for a server that comes back.
        assert await update.prepare(SERVER, no_command) == 0


async def test_a_change_of_everything_is_sent_whole(tmp_path: Path, transports: Any) -> None:
    async with receiver_at(tmp_path / "received") as address:
        transport = transports(address)
        for version in (1, 2):
            generator = torch.Generator().manual_seed(version)
            tensors = {"w": torch.randint(0, 256, (300, 300), generator=generator).to(torch.uint8)}
            (sent,), update = await publish(transport, version, tensors)
            assert sent > 300 * 300
            assert_taken(update)
            assert update.published.base is None


async def test_two_publishers_get_their_own_weights_from_one_receiver(tmp_path: Path, transports: Any) -> None:
    async with receiver_at(tmp_path / "received") as address:
        one, other = transports(address), transports(address)
        for version in (1, 2, 3):
            for seed, transport in enumerate((one, other)):
                _, update = await publish(transport, version, tensors_of(10 * version + seed, step=0.5))
                assert_taken(update)


async def test_a_receiver_that_lost_its_versions_gets_all_again(tmp_path: Path, transports: Any) -> None:
    with held_port() as port:
        transport = transports(f"http://127.0.0.1:{port}")
        for version, folder in ((1, "first"), (2, "other")):
            async with receiver_at(tmp_path / folder, port=port):
                (sent,), update = await publish(transport, version, tensors_of(version, step=0.5))
                assert sent > 5000
                assert_taken(update)
        with pytest.raises(EngineProtocolError, match=rf"{port}: .* version 3: .*rollfeed serve weights"):
            await publish(transport, 3, tensors_of(3, step=0.5))


async def test_a_folder_that_somebody_removed_is_sent_again(tmp_path: Path, transports: Any) -> None:
    async with receiver_at(tmp_path / "received") as address:
        transport = transports(address)
        _, update = await publish(transport, 1, tensors_of(1, step=0.5))
        shutil.rmtree(update.folder_at(SERVER))
        (sent,), update = await publish(transport, 2, tensors_of(2, step=0.5))
        assert_taken(update)
        shutil.rmtree(update.folder_at(SERVER))
        assert await update.prepare(SERVER, no_command) == sent
        assert_taken(update)


@pytest.mark.parametrize("path", ["\0", "a\0b", "", "x" * 5000, "/", "/dev/null", "\ud800", 7, None, ["a"]])
async def test_x06_a_path_that_is_no_deltas_is_refused(tmp_path: Path, path: object) -> None:
    async with receiver_at(tmp_path / "received") as address, aiohttp.ClientSession(address) as session:
        for body in (json.dumps({"path": path}).encode(), b'{"path\xff": 1}'):
            headers = {"Content-Type": "application/json"}
            async with session.post("/prepare_weights_from_delta", data=body, headers=headers) as reply:
                assert reply.status == 400


async def test_bodies_that_are_no_delta_are_refused(tmp_path: Path) -> None:
    async with receiver_at(tmp_path / "received") as address, aiohttp.ClientSession(address) as session:
        for body in ("{", "[]", "{}", '{"path": 3}'):
            headers = {"Content-Type": "application/json"}
            async with session.post("/prepare_weights_from_delta", data=body, headers=headers) as reply:
                assert reply.status == 400
                assert ("has no path" if body != "{" else "is not JSON") in (await reply.json())["message"]
        async with session.post("/prepare_weights_from_delta", data=b"no delta" * 100) as reply:
            assert reply.status == 400
            assert "cut short or no delta" in (await reply.json())["message"]


async def test_what_is_spoilt_on_its_way_is_refused_and_all_is_sent(tmp_path: Path, transports: Any) -> None:
    async with receiver_at(tmp_path / "received") as address:
        transport = transports(address)
        await publish(transport, 1, tensors_of(1, step=0.5))
        update = await transport.stage(TensorUpdate(tensors_of(2, step=0.5), policy_version=2))
        delta = update.published.delta
        content = bytearray(delta.read_bytes())
        content[len(content) // 2] ^= 1
        delta.write_bytes(content)
        assert await update.prepare(SERVER, no_command) > 2 * len(content)
        assert_taken(update)


async def test_without_its_key_a_receiver_tells_and_takes_nothing(tmp_path: Path, transports: Any) -> None:
    async with receiver_at(tmp_path / "received", key="secret") as address:
        with pytest.raises(EngineProtocolError, match=r"version 1: the receiver of weights refuses the key"):
            await publish(transports(address, key="other"), 1, tensors_of(1))
        _, update = await publish(transports(address, key="secret"), 1, tensors_of(1))
        assert_taken(update)


async def test_in_a_shared_folder_only_the_path_is_sent(tmp_path: Path, transports: Any) -> None:
    async with receiver_at(tmp_path / "received") as address:
        transport = transports(address, folder=tmp_path / "shared")
        for version in (1, 2):
            _, update = await publish(transport, version, tensors_of(version, step=0.5))
            assert_taken(update)


async def test_a_server_that_is_no_receiver_is_told_apart(transports: Any) -> None:
    async with serve_application(web.Application(), host="127.0.0.1", port=0) as address:
        with pytest.raises(EngineProtocolError, match=r"HTTP 404 where a receiver .* weights_receivers"):
            await publish(transports(), 1, tensors_of(1), address)


@pytest.mark.parametrize(
    ("held", "taken"),
    [
        (b'{"versions": ' + b"[" * 100_000, b""),
        (b'{"versions": [3]}', b""),
        (b'{"versions": []}', b"[" * 100_000),
        (b'{"versions": []}', b'{"folder": 3}'),
        (b'{"versions": []}', b'{"f\xffolder": 3}'),
    ],
)
async def test_what_a_receiver_says_is_read_or_names_it(transports: Any, held: bytes, taken: bytes) -> None:
    async def tell(request: web.Request) -> web.Response:
        await request.read()
        body = held if request.method == "GET" else taken
        return web.Response(body=body, content_type="application/json")

    application = web.Application(client_max_size=1 << 30)
    application.add_routes([web.get("/prepared_weights", tell), web.post("/prepare_weights_from_delta", tell)])
    async with serve_application(application, host="127.0.0.1", port=0) as address:
        with pytest.raises(EngineProtocolError, match=f"{address}: the receiver of weights does not take version 1"):
            await publish(transports(), 1, tensors_of(1), address)


def test_servers_take_from_the_receiver_of_their_host() -> None:
    several = transport_to("http://a:1", "http://b:1")
    assert several.receiver_of("http://b:30000") == "http://b:1"
    assert transport_to("http://a:1").receiver_of("http://b:30000") == "http://a:1"
    assert transport_to().receiver_of("http://b:30000") == "http://b:30000"
    with pytest.raises(EngineProtocolError, match="http://c:30000: 0 of weights_receivers are on its host"):
        several.meet([MetServer("http://a:30000"), MetServer("http://c:30000")])


DYING = """
import os, signal
from pathlib import Path
from rollfeed.cli.main import entry_point
from rollfeed.weights.transports.delta import files

told, decode, left = Path(TOLD), files.decode, []

def decode_or_die(*given, **named):
    if told.exists():
        left[:] = [(left or [int(told.read_text())])[0] - 1]
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return decode(*given, **named)

files.decode = decode_or_die
entry_point()
"""
"""A receiver that is killed before it has put a piece in its place, once a file says how many it may put there."""


async def test_killed_while_it_applies_it_still_has_the_old_version(tmp_path: Path, transports: Any) -> None:
    root, generator = tmp_path / "received", torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(512, 1024, generator=generator).bfloat16() for i in range(12)}
    transport, versions = transports("http://127.0.0.1:1"), iter(range(1, 100))
    kept, num_told = dict[str, bytes](), tmp_path / "num pieces"
    for num_pieces in (0, 7):
        program = DYING.replace("TOLD", repr(str(num_told)))
        async with process_at("weights", "--folder", str(root), program=program) as (process, address):
            transport._receivers = (address,)
            if kept:  # what was there before the kill is there, and nothing else
                assert not list(root.glob(".version*"))
                assert content_of(max(path for path in root.glob("version-*") if path.is_dir())) == kept
            _, update = await publish(transport, next(versions), tensors)
            assert_taken(update)
            kept = content_of(update.folder)
            tensors = {name: tensor + 0.125 for name, tensor in tensors.items()}
            num_told.write_text(str(num_pieces))
            with pytest.raises(EngineProtocolError):
                await publish(transport, next(versions), tensors)
            assert await process.wait() == -signal.SIGKILL
            num_told.unlink()
        assert list(root.glob(".version*"))  # it was in the middle


async def test_a_full_disk_keeps_the_old_version(tmp_path: Path, transports: Any) -> None:
    root = tmp_path / "received"
    async with process_at("weights", "--folder", str(root), most_kilobytes=1024) as (_, address):
        transport = transports(address)
        _, update = await publish(transport, 1, {"w": torch.zeros(400_000, dtype=torch.bfloat16)})
        assert_taken(update)
        random = np.random.default_rng(0).integers(0, 256, 2_000_000).astype(np.uint8)
        with pytest.raises(EngineProtocolError, match=r"takes no weights of version 2: File too large, so the delta"):
            await publish(transport, 2, {"w": torch.from_numpy(random)})
        assert_taken(update)
        _, update = await publish(transport, 3, {"w": torch.ones(400_000, dtype=torch.bfloat16)})
        assert_taken(update)
        assert not list(root.glob(".incoming*")) + list(root.glob(".version*"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--host", "0.0.0.0"], "--key-env"),
        (["--port", "70000"], "--port 70000"),
        (["--key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    from rollfeed.cli.main import main

    assert main(["serve", "weights", "--folder", str(tmp_path), *arguments]) == 2
    assert told in capsys.readouterr().err
