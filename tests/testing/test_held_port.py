"""Servers that go away come again on their port, which nobody else is given meanwhile."""

import socket

import pytest

from rollfeed.testing.fake_sglang import serve_fake_sglang
from rollfeed.testing.held_port import hold_port


def test_a_held_port_refuses_connections_until_somebody_listens_there() -> None:
    with hold_port() as held:
        address = held.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with socket.create_server(address) as server, socket.create_connection(address):
            server.accept()[0].close()


async def test_a_fake_that_is_down_keeps_its_port() -> None:
    async with serve_fake_sglang() as fakes:
        host, port = fakes.address.removeprefix("http://").split(":")
        fakes.kill()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
        await fakes.servers[0].restart()
        assert (await fakes.stats())["num_running"] == 0
