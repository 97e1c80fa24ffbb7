"""How late the event loop gets to run while the embedded engine decodes.

A task sleeps for a few milliseconds at a time and notes how much later than asked for it wakes, first
beside an engine that waits, then beside one that decodes with all slots full.

    python bench/event_loop_lag.py --output bench/event_loop_lag.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.engine import DEFAULT_MODEL, resolve_checkpoint
from rollfeed.engine.local import create_local_engine
from rollfeed.prompts.tokenizer import load_tokenizer
from rollfeed.protocols import Engine
from rollfeed.types import SamplingParams

GROUP_SIZE = 8
NUM_NEW_TOKENS = 64
INTERVAL_SECONDS = 0.005
QUESTIONS = [
    "What is the capital of France?",
    "Write a story about a dog.",
    "How do I cook rice?",
    "Which is larger, 37 or 73?",
]


class Decoding:
    """Keeps the engine's slots full, group after group, and counts the tokens."""

    def __init__(self, engine: Engine, prompts: list[NDArray[np.int32]], *, seed: int) -> None:
        self._engine = engine
        self._prompts = prompts
        self._seed = seed
        self.num_tokens = 0
        self._stopped = False

    async def keep_one_slot_full(self, slot: int) -> None:
        prompt = self._prompts[slot // GROUP_SIZE % len(self._prompts)]
        number = slot
        while not self._stopped:
            params = SamplingParams(
                max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=NUM_NEW_TOKENS, seed=self._seed * 1_000_003 + number
            )
            completion = await self._engine.generate(prompt, params, request_id=str(number))
            self.num_tokens += len(completion.token_ids)
            number += self._engine.max_running_requests

    async def stop(self) -> None:
        self._stopped = True
        await self._engine.abort()


async def measure_lag(seconds: float) -> NDArray[np.float64]:
    """Return how many milliseconds late each wake-up was."""
    lags: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        await asyncio.sleep(INTERVAL_SECONDS)
        lags.append((time.perf_counter() - start - INTERVAL_SECONDS) * 1e3)
    return np.array(lags)


def summary(lags_ms: NDArray[np.float64]) -> dict[str, float]:
    p50, p99 = np.percentile(lags_ms, [50, 99])
    return {
        "p50_ms": round(float(p50), 3),
        "p99_ms": round(float(p99), 3),
        "max_ms": round(float(lags_ms.max()), 3),
        "num_wake_ups": len(lags_ms),
    }


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


async def measure(*, threads: int, num_slots: int, seconds: float, seed: int) -> dict[str, Any]:
    load_before = round(os.getloadavg()[0], 2)
    folder = resolve_checkpoint(DEFAULT_MODEL)
    tokenizer = load_tokenizer(folder)
    texts = [tokenizer.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    engine = create_local_engine(
        checkpoint=folder,
        tokenizer=tokenizer,
        threads=threads,
        num_slots=num_slots,
        context_length=512,
        deterministic=False,
    )
    async with engine:
        idle = await measure_lag(seconds / 4)
        decoding = Decoding(engine, prompts, seed=seed)
        tasks = [asyncio.create_task(decoding.keep_one_slot_full(slot)) for slot in range(num_slots)]
        started = time.perf_counter()
        busy = await measure_lag(seconds)
        await decoding.stop()
        await asyncio.gather(*tasks)
        elapsed_seconds = time.perf_counter() - started
    return {
        "threads": threads,
        "load_before": load_before,
        "lag_while_decoding": summary(busy),
        "lag_while_idle": summary(idle),
        "tokens_per_second": round(decoding.num_tokens / elapsed_seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of torch; measured one after the other")
    parser.add_argument("--num-slots", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    runs = [
        asyncio.run(
            measure(threads=threads, num_slots=arguments.num_slots, seconds=arguments.seconds, seed=arguments.seed)
        )
        for threads in arguments.threads
    ]
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "workload": f"{DEFAULT_MODEL}, {arguments.num_slots} slots full, requests of {NUM_NEW_TOKENS} tokens",
        "seed": arguments.seed,
        "runs": runs,
        "machine": {
            "cores": os.cpu_count(),
            "cpu": cpu_name(),
            "python": platform.python_version(),
            "torch": version("torch"),
        },
    }
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
