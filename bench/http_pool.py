"""Measure our pool of connections beside aiohttp's client: processor time for replies that are received, not decoded.

Run it with::

    python bench/http_pool.py --out bench/http_pool.json

The server, which takes no time, is a process of its own, and so is each client, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import httptools
import msgspec

from rollfeed.benchmarks.machine import machine
from rollfeed.engine.http import Connections
from rollfeed.testing.fake_sglang import start_fake_sglang

PROMPT_TOKENS = 150
CLIENTS = ("pool", "aiohttp")
Ask = Callable[[bytes], Awaitable[int]]


def main() -> None:
    """Measure every pair of a length and a number in flight, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 8000])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--min-tokens", type=int, default=4_000_000, help="that a client receives in a repetition")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a file for the figures")
    parser.add_argument("--client", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client is not None:
        seconds = asyncio.run(measure(arguments.client, arguments.address, *arguments.tokens, *arguments.in_flight))
        print(json.dumps(seconds))
        return
    cells = [
        asyncio.run(cell(tokens, in_flight, arguments))
        for tokens in arguments.tokens
        for in_flight in arguments.in_flight
    ]
    figures = {
        "cells": cells,
        "command": "python bench/http_pool.py --out bench/http_pool.json",
        "repetitions": arguments.repetitions,
        "min_tokens": arguments.min_tokens,
        "seed": "of a request: its number",
        "machine": machine(),
        "versions": {"aiohttp": aiohttp.__version__, "httptools": httptools.__version__},
    }
    text = json.dumps(figures, indent=2) + "\n"
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text, encoding="utf-8")


async def cell(tokens: int, in_flight: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both clients, in turn, on one server."""
    costs: dict[str, list[float]] = {name: [] for name in CLIENTS}
    async with start_fake_sglang(mode="zero") as fakes:
        for _ in range(arguments.repetitions):
            for name in CLIENTS:
                options = ["--client", name, "--address", fakes.address, "--tokens", str(tokens), "--in-flight"]
                command = [sys.executable, __file__, *options, str(in_flight), str(arguments.min_tokens)]
                ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
                costs[name].append(json.loads(ran.stdout))
                print(f"{tokens} tokens, {in_flight} in flight: {name} {costs[name][-1]:.3f} s", file=sys.stderr)
    return {
        "tokens": tokens,
        "in_flight": in_flight,
        **{f"{name}_cpu_seconds_per_million_tokens": median(costs[name]) for name in CLIENTS},
        "by_repetition": costs,
    }


async def measure(client: str, address: str, tokens: int, in_flight: int, min_tokens: int) -> float:
    """Return the processor time of this process for a million tokens."""
    num_requests = max(in_flight, min_tokens // tokens)
    numbers = iter(range(num_requests + in_flight))

    async def work(ask: Ask, until: int) -> None:
        while (number := next(numbers)) < until:
            params = {"max_new_tokens": tokens, "temperature": 1.0, "sampling_seed": number}
            ids = list(range(100, 100 + PROMPT_TOKENS))
            body = {"rid": str(number), "input_ids": ids, "sampling_params": params, "return_logprob": True}
            assert await ask(msgspec.json.encode(body)) > 10 * tokens

    async def run(ask: Ask) -> float:
        await asyncio.gather(*(ask(msgspec.json.encode(warm)) for _ in range(in_flight)))
        began = time.process_time()
        await asyncio.gather(*(work(ask, num_requests) for _ in range(in_flight)))
        return (time.process_time() - began) / (num_requests * tokens) * 1e6

    warm = {"rid": "w", "input_ids": [100], "sampling_params": {"max_new_tokens": 16}, "return_logprob": True}
    if client == "pool":
        pool = Connections(limit=in_flight, headers={})

        async def ask_pool(body: bytes) -> int:
            return len((await pool.request("POST", address, "/generate", body)).content or b"")

        try:
            return await run(ask_pool)
        finally:
            await pool.close()
    connector = aiohttp.TCPConnector(limit=in_flight)
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(connector=connector, cookie_jar=jar, trust_env=False) as session:

        async def ask_aiohttp(body: bytes) -> int:
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{address}/generate", data=body, headers=headers) as response:
                return len(await response.read())

        return await run(ask_aiohttp)


if __name__ == "__main__":
    main()
