"""``rollfeed bench fleet``: its options, and its figures in sentences."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from rollfeed.errors import ConfigError

TOLD = (
    "the driver of a thousand servers, simulated",
    "Run everything of a run but its servers and sockets, which are simulated: a time of servers that passes by what "
    "this side computes and jumps where it waits, so that it is late where a core would be. Servers are slow, "
    "die and get new weights. Says what a token costs the driver, how late it is, its memory, and how busy the "
    "servers are. At its full size it takes an hour and needs 8 GB.",
    "--servers 100 --in-flight 10000 --minutes 5 --json",
)
"""Help, description and example."""
NUMBERS: dict[str, tuple[int | float, str, int | float]] = {
    "--servers": (1_000, "simulated", 1),
    "--in-flight": (100_000, "requests at all servers together, which decode no more", 1),
    "--minutes": (10.0, "of the servers' time that are measured", 0.01),
    "--warm-up": (10.0, "minutes before: all requests begin at once, and the short ones end first", 0),
    "--deaths": (100.0, "of servers, times the published rate: 419 in 54 days on 16,384 GPUs", 0),
    "--seed": (0, "of prompts, lengths and deaths", 0),
}


def measure(arguments: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """Simulate a fleet of the size that is asked for. Raises ConfigError where requests do not divide."""
    from rollfeed.benchmarks.fleet.fleet_bench import bench_fleet
    from rollfeed.benchmarks.fleet.fleet_workload import FleetWorkload

    servers, in_flight = arguments.servers, arguments.in_flight
    if in_flight % servers:
        raise ConfigError(f"--in-flight {in_flight}: give a multiple of --servers {servers}")
    workload = FleetWorkload(
        num_engines=servers,
        num_slots=in_flight // servers,
        rollout_batch_size=max(1, in_flight // 100),
        death_factor=arguments.deaths,
        seed=arguments.seed,
    )
    return bench_fleet(workload, warm_up_minutes=arguments.warm_up, minutes=arguments.minutes, progress=progress)


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Tell what has been found."""
    yield (
        f"{result['servers']} servers, {result['requests_at_servers']} requests: {result['tokens_per_second']:.0f} "
        f"tokens/s, servers {result['utilisation']:.1%} busy"
    )
    yield (
        f"driver: {result['driver_cores']:.2f} cores, {result['driver_seconds_per_million_tokens']:.2f} s a million "
        f"tokens, {result['driver_milliseconds_per_request']:.2f} ms a request, {result['driver_memory_mb']:.0f} MB "
        f"({result['driver_kilobytes_per_request']:.0f} KB a request) and {result['simulation_memory_mb']:.0f} MB that "
        "are the simulation's"
    )
    yield (
        f"event loop late by {1e3 * result['lag_seconds_p50']:.1f} ms in the median, {result['lag_seconds_p99']:.2f} s "
        f"at 99 %, {result['lag_seconds_max']:.2f} s at most"
    )
    costs = result["reply_microseconds_per_token"]
    yield (
        f"of it reading replies: {costs['whole']:.2f} us a token; of streams of one event a token it would be "
        f"{costs['streamed']:.2f} us"
    )
    back = [each["back"] for each in result["deaths"] if each["back"] is not None]
    yield f"{len(result['deaths'])} servers died" + (f", back after {max(back):.0f} s at most" if back else "")
