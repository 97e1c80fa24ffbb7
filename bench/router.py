"""Measure choices of servers on replayed conversations, and routers beside each other on the same fake servers.

Run it with::

    python bench/router.py replay --out bench/router_replay.json
    python bench/router.py routers --peer sglang-router=.venv-router/bin/python --peer smg=VENV/bin/python \
        --peer vllm-router=VENV/bin/python --out bench/router.json

``replay`` takes virtual time, so the machine may be busy; ``routers`` takes real time and wants a quiet one. Peers come
from PyPI, each in a virtual environment of its own, and are named with its Python.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray
from session_replay.replay_bench import bench_replay
from session_replay.server_choices import PrefixAndLoad
from session_replay.session_traces import SessionsWorkload, SessionTrace, make_sessions

from rollfeed.benchmarks.machine import command_environment, free_port, machine
from rollfeed.routing import ServerLoadView
from rollfeed.testing.fake_sglang import Fakes, start_fake_sglang

START_SECONDS = 300.0
SMALL = SessionsWorkload(num_sessions=120, num_engines=4, num_slots=2, arrival_seconds=6.0, kv_budget_tokens=150_000)
"""The share of the replayed conversations that is sent through routers in real time."""
OTHERS: dict[str, dict[str, Any]] = {
    "memory for a third": {"kv_budget_tokens": 200_000},
    "as many turns for all": {"turns_skew": 0.0},
    "slots to spare": {"num_engines": 12, "num_slots": 16},
}
"""Besides the sizes of memory that goals are for: where choices matter less, or help less."""
CONTROL: dict[str, dict[str, Any]] = {
    "/abort_request": {"rid": "", "abort_all": True},
    "/pause_generation": {"mode": "abort"},
    "/continue_generation": {},
    "/flush_cache": {},
    "/update_weights_from_disk": {"model_path": "/nowhere", "weight_version": "3"},
}
OPTIONS = {"smg": ["--routing-key-headers", "X-SMG-Routing-Key", "--disable-worker-overload-protection"]}
"""Of peers, for what they are asked to do: smg would send conversations away from servers where eight requests wait."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Route(NamedTuple):
    """A way to the servers."""

    name: str
    command: Callable[[int, Sequence[str]], Sequence[str | Path]] | None
    """Of a router, from its port and its servers; None is the client's own choice."""


def peer_routes(name: str, python: str) -> Iterator[Route]:
    """Yield a peer's policies that are made for conversations."""
    modules = {"sglang-router": "sglang_router.launch_router", "smg": "smg.launch_router"}
    policies = {
        "sglang-router": [["cache_aware"], ["manual", "--assignment-mode", "min_load"]],
        "smg": [["cache_aware"], ["manual", "--assignment-mode", "min_load"], ["consistent_hashing"]],
        "vllm-router": [["cache_aware"], ["consistent_hash"]],
    }
    start = [python, "-m", modules[name]] if name in modules else [Path(python).with_name(name)]
    for policy in policies[name]:

        def command(port: int, servers: Sequence[str], policy: Sequence[str] = policy) -> Sequence[str | Path]:
            of_port = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
            others = OPTIONS.get(name, [])
            return [*start, *of_port, "--log-level", "error", "--policy", *policy, *others, "--worker-urls", *servers]

        yield Route(f"{name} {policy[0]}", command)


def our_command(port: int, servers: Sequence[str]) -> Sequence[str]:
    """Return what starts our router."""
    return [sys.executable, "-m", "rollfeed", "serve", "router", *servers, "--port", str(port)]


class Router:
    """A router's process, or none; ``address`` is where requests go."""

    def __init__(self, route: Route, servers: Sequence[str]) -> None:
        self._port = free_port()
        self.address = f"http://127.0.0.1:{self._port}" if route.command else None
        self._command = route.command(self._port, servers) if route.command else None
        self.process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Router:
        if self._command is None:
            return self
        kept = {name: each for name, each in command_environment().items() if not name.lower().endswith("_proxy")}
        out = subprocess.DEVNULL
        self.process = subprocess.Popen(  # noqa: ASYNC220  # it does not wait
            self._command, stdin=out, stdout=out, stderr=out, env=kept
        )
        deadline = time.monotonic() + START_SECONDS
        async with aiohttp.ClientSession() as session:
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}}
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.post(f"{self.address}/generate", json=body) as response:
                        if response.status == 200:
                            return self
                if time.monotonic() > deadline or self.process.poll() is not None:
                    self.process.kill()
                    raise SystemExit(f"does not serve: {' '.join(map(str, self._command))}")
                await asyncio.sleep(0.1)

    async def __aexit__(self, *exc_info: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def cpu_seconds(self) -> float:
        """Return the processor time of the process so far."""
        if self.process is None:
            return 0.0
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


async def ask(
    session: aiohttp.ClientSession, address: str, token_ids: NDArray[np.int32], num_sampled: int, name: str, rid: str
) -> tuple[float, dict[str, Any]]:
    """Ask for tokens and return the seconds it took, and the reply."""
    params = {"max_new_tokens": num_sampled, "ignore_eos": True, "temperature": 1.0}
    body = {"rid": rid, "input_ids": token_ids.tolist(), "sampling_params": params, "stream": False}
    data = msgspec.json.encode(body)
    # Each router looks for the name of a conversation in a header of its own.
    names = dict.fromkeys(("X-SMG-Routing-Key", "X-Session-ID", "X-Correlation-ID"), name)
    headers = {"Content-Type": "application/json", **names}
    began = time.perf_counter()
    async with session.post(f"{address}/generate", data=data, headers=headers) as response:
        content = await response.read()
        seconds = time.perf_counter() - began
        if response.status != 200:
            raise SystemExit(f"{address}: {response.status} {content[:300]!r}")
    return seconds, msgspec.json.decode(content)


class Replay:
    """Conversations sent through one route in real time."""

    def __init__(self, session: aiohttp.ClientSession, fakes: Fakes, address: str | None, speed: float) -> None:
        self._session, self._address, self._speed = session, address, speed
        self._chooser = PrefixAndLoad()
        self._requests = dict.fromkeys(fakes.addresses, 0)
        self._tokens = dict.fromkeys(fakes.addresses, 0)
        self._prompt_tokens = self._cached_tokens = self._num_requests = 0

    async def run(self, sessions: Sequence[SessionTrace]) -> dict[str, Any]:
        """Return figures; times are the servers'."""
        began = time.perf_counter()
        await asyncio.gather(*map(self._converse, sessions))
        return {
            "wall_seconds": (time.perf_counter() - began) * self._speed,
            "hit_rate": self._cached_tokens / self._prompt_tokens,
            "requests": self._num_requests,
        }

    async def _converse(self, session: SessionTrace) -> None:
        await asyncio.sleep(session.arrival / self._speed)
        token_ids = np.zeros(0, np.int32)
        for index, turn in enumerate(session.turns):
            token_ids = np.concatenate([token_ids, turn.told])
            address = self._address or self._choose(session, token_ids)
            rid = f"{session.name} {index}"
            _, reply = await ask(self._session, address, token_ids, turn.num_sampled, session.name, rid)
            meta = reply["meta_info"]
            self._num_requests += 1
            self._prompt_tokens += meta["prompt_tokens"]
            self._cached_tokens += meta["cached_tokens"]
            num_before = len(token_ids)
            token_ids = np.concatenate([token_ids, np.array(reply["output_ids"], np.int32)])
            if self._address is None:
                self._requests[address] -= 1
                self._tokens[address] -= num_before
                self._chooser.ended(address, token_ids)
            await asyncio.sleep(turn.wait_seconds / self._speed)

    def _choose(self, session: SessionTrace, token_ids: NDArray[np.int32]) -> str:
        loads = [ServerLoadView(each, self._requests[each], self._tokens[each]) for each in self._requests]
        address = self._chooser.choose(loads, token_ids, session=session.name, group=session.group)
        self._requests[address] += 1
        self._tokens[address] += len(token_ids)
        return address


async def replay_through(route: Route, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a route on conversations that take their time."""
    workload = replace(SMALL, num_sessions=arguments.sessions, seed=arguments.seed)
    fields = {"mode": "time-model", "num_workers": workload.num_engines, "speed": arguments.speed}
    async with (
        start_fake_sglang(**fields, time_model=workload.fleet_model, keep_requests=0) as fakes,
        Router(route, fakes.addresses) as router,
        _client() as session,
    ):
        before = router.cpu_seconds()
        figures = await Replay(session, fakes, router.address, arguments.speed).run(make_sessions(workload))
        cpu_ms = 1e3 * (router.cpu_seconds() - before) / figures["requests"]
        counts = [(await fakes.stats(number))["requests"].get("/generate", 0) for number in range(workload.num_engines)]
        return figures | {"cpu_ms_per_request": cpu_ms, "requests_at_servers": counts}


async def added_latency(routes: Sequence[Route], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what each route adds to a request of servers that take no time, all of them asked in turn."""
    random = np.random.default_rng(arguments.seed)
    seconds: dict[str, list[float]] = {route.name: [] for route in routes}
    cpu: dict[str, float] = dict.fromkeys(seconds, 0.0)
    async with contextlib.AsyncExitStack() as stack:
        fakes = await stack.enter_async_context(start_fake_sglang(mode="zero", num_workers=SMALL.num_engines))
        session = await stack.enter_async_context(_client())
        routers = {route.name: await stack.enter_async_context(Router(route, fakes.addresses)) for route in routes}
        for repetition in range(arguments.repetitions + 1):
            for name, router in routers.items():
                before = router.cpu_seconds()
                address = router.address or fakes.addresses[repetition % len(fakes.addresses)]
                told = await _burst(session, address, random, arguments, f"{name} {repetition}")
                if repetition:  # the first one warms up
                    seconds[name] += told
                    cpu[name] += router.cpu_seconds() - before
    direct = np.array(seconds["direct"])
    return {
        name: {
            **{f"p{q}_ms": 1e3 * float(np.percentile(each, q)) for q in (50, 99)},
            **{f"added_p{q}_ms": 1e3 * float(np.percentile(each, q) - np.percentile(direct, q)) for q in (50, 99)},
            "cpu_ms_per_request": 1e3 * cpu[name] / len(each),
        }
        for name, each in seconds.items()
    }


async def _burst(
    session: aiohttp.ClientSession, address: str, random: np.random.Generator, arguments: argparse.Namespace, name: str
) -> list[float]:
    """Ask so many at once, again and again, each conversation adding to its prompt."""
    seconds: list[float] = []

    async def converse(index: int) -> None:
        token_ids = random.integers(1_000, 20_000, arguments.prompt_tokens).astype(np.int32)
        for turn in range(arguments.turns):
            rid = f"{name} {index} {turn}"
            took, reply = await ask(session, address, token_ids, 100, f"{name} {index}", rid)
            seconds.append(took)
            token_ids = np.concatenate([token_ids, np.array(reply["output_ids"], np.int32)])

    await asyncio.gather(*map(converse, range(arguments.in_flight)))
    return seconds


async def reached_by_control(route: Route) -> dict[str, str]:
    """Return how many of two servers are told of what concerns all of them, or one whose request it is."""
    told = {}
    async with (
        start_fake_sglang(mode="time-model", num_workers=2) as fakes,
        Router(route, fakes.addresses) as router,
        _client() as session,
    ):
        for path, body in CONTROL.items():
            async with session.post(f"{router.address}{path}", json=body) as response:
                counts = [(await fakes.stats(number))["requests"].get(path, 0) for number in (0, 1)]
                told[path] = f"{response.status}, {sum(count > 0 for count in counts)} of 2 servers"
    return told


def _client() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=600.0)
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)


def measure_routers(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all routes, in turn."""
    peers = dict(each.split("=", 1) for each in arguments.peer)
    routes = [Route("direct", None), Route("rollfeed", our_command)]
    routes += [route for name, python in peers.items() for route in peer_routes(name, python)]
    routes = [route for route in routes if route.name not in arguments.skip]
    replayed = {}
    for route in [] if arguments.no_replay else routes:
        replayed[route.name] = asyncio.run(replay_through(route, arguments))
        print(f"{route.name}: {replayed[route.name]}", file=sys.stderr, flush=True)
    control = {route.name: asyncio.run(reached_by_control(route)) for route in routes if route.command is not None}
    added = asyncio.run(added_latency(routes, arguments))
    for name, figures in added.items():
        print(f"{name}: {figures}", file=sys.stderr, flush=True)
    workload = asdict(replace(SMALL, num_sessions=arguments.sessions, seed=arguments.seed))
    version = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    versions = {
        name: subprocess.run([python, "-c", version, name], capture_output=True, text=True, check=True).stdout.strip()
        for name, python in peers.items()
    }
    sizes = {name: getattr(arguments, name) for name in ("speed", "repetitions", "in_flight", "turns", "prompt_tokens")}
    return {
        "workload": workload,
        **sizes,
        "versions": versions,
        "replayed": replayed,
        "added": added,
        "control": control,
    }


def progress(line: str) -> None:
    """Say how far it is."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    replaying = actions.add_parser("replay", help="policies, in virtual time")
    replaying.add_argument("--sessions", type=int, default=600)
    replaying.add_argument("--cache-tokens", type=int, nargs="+", default=[250_000, 400_000, 640_000])
    replaying.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    replaying.add_argument("--turns-skew", type=float, default=SessionsWorkload().turns_skew)
    replaying.add_argument("--engines", type=int, default=SessionsWorkload().num_engines)
    replaying.add_argument("--no-others", dest="others", action="store_false", help="leave the other workloads out")
    replaying.add_argument("--slots", type=int, default=SessionsWorkload().num_slots)
    routing = actions.add_parser("routers", help="routers, in real time")
    routing.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    routing.add_argument("--skip", action="append", default=[], metavar="ROUTE", help="leave one out")
    routing.add_argument("--sessions", type=int, default=SMALL.num_sessions)
    routing.add_argument("--speed", type=float, default=8.0, help="of the servers' clock")
    routing.add_argument("--seed", type=int, default=0)
    routing.add_argument("--repetitions", type=int, default=5)
    routing.add_argument("--in-flight", type=int, default=1)
    routing.add_argument("--turns", type=int, default=50)
    routing.add_argument("--prompt-tokens", type=int, default=4_000)
    routing.add_argument("--no-replay", action="store_true", help="measure the added latency only")
    for each in (replaying, routing):
        each.add_argument("--out", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    if arguments.action == "replay":
        workload = SessionsWorkload(
            num_sessions=arguments.sessions,
            turns_skew=arguments.turns_skew,
            num_engines=arguments.engines,
            num_slots=arguments.slots,
        )
        options = {"cache_tokens": arguments.cache_tokens, "seeds": arguments.seeds}
        figures = bench_replay(workload, **options, progress=progress)
        others = {name: replace(workload, **changes) for name, changes in OTHERS.items() if arguments.others}
        figures["others"] = {
            name: bench_replay(
                other, cache_tokens=[other.kv_budget_tokens], seeds=arguments.seeds[:1], progress=progress
            )
            for name, other in others.items()
        }
    else:
        figures = measure_routers(arguments)
    figures |= {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    text = json.dumps(figures, indent=2) + "\n"
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
