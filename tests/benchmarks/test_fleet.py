"""A fleet in memory: its time, its connections, and a small one whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest

from rollfeed.benchmarks.fleet.fleet_loop import FleetLoop, StandstillError
from rollfeed.benchmarks.fleet.fleet_workload import FleetWorkload
from rollfeed.cli import exit_codes
from rollfeed.cli.main import main

HOUR = 3_600.0


def run_virtually(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=FleetLoop) as runner:
        return runner.run(work)


def test_time_jumps_to_what_is_next() -> None:
    async def work() -> tuple[float, list[str]]:
        told: list[str] = []
        loop = asyncio.get_running_loop()
        loop.call_later(2 * HOUR, told.append, "late")
        loop.call_later(HOUR, told.append, "early")
        began = loop.time()
        await asyncio.sleep(3 * HOUR)
        return loop.time() - began, told

    seconds, told = run_virtually(work())
    assert told == ["early", "late"]
    assert 3 * HOUR <= seconds < 4 * HOUR


def test_time_does_not_jump_while_a_thread_works() -> None:
    async def work() -> float:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(HOUR, lambda: None)
        await asyncio.to_thread(sum, range(10))
        timer.cancel()
        return loop.time()

    assert run_virtually(work()) < HOUR


def test_what_can_never_happen_is_not_waited_for() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(StandstillError, match="nothing is left"):
        run_virtually(work())


def test_bytes_come_whole_and_in_order_and_a_full_connection_holds_its_writer() -> None:
    sent = bytes(range(256)) * 8_192

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(len(sent)))
        await writer.drain()
        writer.close()

    async def work() -> bytes:
        loop = asyncio.get_running_loop()

        def accept() -> asyncio.StreamReaderProtocol:
            reader = asyncio.StreamReader(limit=1 << 12, loop=loop)
            return asyncio.StreamReaderProtocol(reader, serve, loop=loop)

        listener = await loop.create_server(accept, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await writer.drain()
        got = await reader.read()
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        return got

    assert run_virtually(work()) == sent


def test_published_deaths_of_a_thousand_servers_are_six_hours_apart() -> None:
    assert 1.0 / FleetWorkload(death_factor=1.0).deaths_per_second == pytest.approx(6.34 * HOUR, rel=0.01)


def test_a_small_fleet_with_deaths(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--servers", "10", "--in-flight", "50", "--minutes", "2", "--warm-up", "1", "--deaths", "60000"]
    assert main(["bench", "fleet", *size, "--json"]) == exit_codes.DONE
    result = json.loads(capsys.readouterr().out)
    assert 0.0 < result["utilisation"] <= 1.0
    assert result["tokens_per_second"] > 0.0
    assert result["driver_seconds_per_million_tokens"] > 0.0
    assert result["deaths"]
    assert 0.0 < result["simulation_memory_mb"] < result["peak_memory_mb"]
    assert result["driver_memory_mb"] == result["peak_memory_mb"] - result["simulation_memory_mb"]
    assert set(result["reply_microseconds_per_token"]) == {"whole", "streamed"}


def test_requests_that_no_server_could_have_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fleet", "--servers", "3", "--in-flight", "50"]) == exit_codes.USAGE
    assert "--in-flight 50: give a multiple of --servers 3" in capsys.readouterr().err
