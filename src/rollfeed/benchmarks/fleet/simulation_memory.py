"""The memory that a simulated fleet takes without a driver, which is to be taken off that of both."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from urllib.parse import urlsplit

import msgspec

from rollfeed.benchmarks.client_process import peak_bytes
from rollfeed.benchmarks.fleet.fleet_loop import FleetLoop
from rollfeed.benchmarks.fleet.fleet_servers import FleetServers
from rollfeed.benchmarks.fleet.fleet_workload import FleetWorkload

_SETTLING_SECONDS = 1.0
_MEGABYTE = 1 << 20


def simulation_megabytes(workload: FleetWorkload) -> float:
    """Return what servers and connections take while all requests are there, by a process that has only these."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        return processes.submit(_alone, workload).result()


def _alone(workload: FleetWorkload) -> float:
    with asyncio.Runner(loop_factory=FleetLoop) as runner:
        return runner.run(_filled(workload))


async def _filled(workload: FleetWorkload) -> float:
    """Send every request as a bare protocol does, and return by how much the process has grown."""
    loop, before = asyncio.get_running_loop(), peak_bytes()
    assert isinstance(loop, FleetLoop)
    servers = FleetServers(workload, loop)
    ports = [urlsplit(address).port for address in await servers.start()]
    params = {"max_new_tokens": workload.max_length}
    for number in range(workload.requests_at_servers):
        content = {"rid": str(number), "input_ids": [*range(workload.prompt_tokens)], "sampling_params": params}
        body = msgspec.json.encode({**content, "return_logprob": True, "stream": False})
        client, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", ports[number % len(ports)])
        client.write(b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await asyncio.sleep(_SETTLING_SECONDS)
    after = peak_bytes()
    await servers.stop()
    return (after - before) / _MEGABYTE
