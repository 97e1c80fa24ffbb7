"""CPU time of a turn of a whole run's process, by how many episodes are in flight at once.

A run (ledger, verdicts of the environment, store) over HTTP against a fake engine in a process of its own, which
answers after the time of a real one. Every episode takes all of its environment's turns, as the fake guesses nothing.

::

    python bench/episodes.py --output bench/episodes.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rollfeed.app import environment_source, load_model, open_rollouts
from rollfeed.benchmarks.machine import machine
from rollfeed.config import RolloutConfig, RolloutSettings, SamplingSettings
from rollfeed.config.engine import SGLangSettings
from rollfeed.engine import DEFAULT_MODEL
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.protocols import Tokenizer
from rollfeed.store import RunDirectory
from rollfeed.testing.fake_sglang import FakeMode, Fakes, FakeSettings, TimeModelSettings, start_fake_sglang

GOALS = {"turn_ms_last_over_first": 1.1}
_CONTEXT_LENGTH = 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesWorkload:
    """Episodes of one environment of several turns."""

    in_flight: tuple[int, ...] = (10, 100, 1000)
    """Episodes at once, which are a batch."""
    least_episodes: int = 500
    """That are measured of each, in whole batches."""
    repetitions: int = 3
    n_samples_per_prompt: int = 5
    environment: str = "core/guess_number"
    level: int = 5
    """Of 8 turns."""
    tokens_per_turn: int = 16
    step_ms: float = 4.0
    """Of the engine, and 0.05 more for each request."""
    seed: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="of whose tokenizer and template")
    arguments = parser.parse_args()
    workload = EpisodesWorkload(in_flight=tuple(arguments.in_flight), repetitions=arguments.repetitions)
    tokenizer = load_model(arguments.model, with_weights=False).tokenizer
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        **measure_all(workload, tokenizer),
        "workload": asdict(workload),
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measure_all(workload: EpisodesWorkload, tokenizer: Tokenizer) -> dict[str, Any]:
    """Measure each number of episodes in turn, again and again."""
    found: dict[int, list[dict[str, float]]] = {number: [] for number in workload.in_flight}
    for _ in range(workload.repetitions):
        for number, measured in found.items():
            measured.append(asyncio.run(_measure(workload, number, tokenizer)))
            print(f"{number} episodes in flight: {measured[-1]['turn_ms']:.2f} ms of CPU time a turn", flush=True)
    rows: list[dict[str, Any]] = [
        {
            "in_flight": number,
            **{key: median(each[key] for each in measured) for key in measured[0]},
            "turn_ms_of_each": [each["turn_ms"] for each in measured],
        }
        for number, measured in found.items()
    ]
    return {"episodes": rows, "turn_ms_last_over_first": rows[-1]["turn_ms"] / rows[0]["turn_ms"], "goals": GOALS}


async def _measure(workload: EpisodesWorkload, in_flight: int, tokenizer: Tokenizer) -> dict[str, float]:
    num_batches = -(-workload.least_episodes // in_flight)
    lengths: dict[str, Any] = {"median_length": workload.tokens_per_turn, "sigma_between": 0.0, "sigma_within": 0.0}
    time_model = TimeModelSettings(
        num_slots=in_flight, step_ms=workload.step_ms, max_length=workload.tokens_per_turn, prefix_cache=True, **lengths
    )
    source = environment_source(workload.environment, level=workload.level, seed=workload.seed, tokenizer=tokenizer)
    config = RolloutConfig(
        seed=workload.seed,
        rollout=RolloutSettings(
            num_rollout=num_batches + 1,
            rollout_batch_size=in_flight // workload.n_samples_per_prompt,
            n_samples_per_prompt=workload.n_samples_per_prompt,
            max_requests_in_flight=in_flight,
        ),
        sampling=SamplingSettings(rollout_max_response_len=_CONTEXT_LENGTH // 2),
    )
    fake = FakeSettings(
        mode=FakeMode.TIME_MODEL, time_model=time_model, context_length=_CONTEXT_LENGTH, keep_requests=0
    )
    with (
        tempfile.TemporaryDirectory(prefix="rollfeed-bench-") as name,
        RunDirectory.open(Path(name, "run"), settings={}, identity={}, overwrite=False) as directory,
    ):
        async with start_fake_sglang(fake) as fakes:
            servers = SGLangSettings(workers=fakes.addresses, concurrency=in_flight, max_connections=2 * in_flight)
            engine = ServerEngine(SGLang(servers), context_length=_CONTEXT_LENGTH, tokenizer=tokenizer)
            async with open_rollouts(
                config,
                source=source,
                engine=engine,
                tokenizer=tokenizer,
                commit=lambda step: directory.commit(step, reward_key=None),
                turns=directory.turns,
            ) as rollouts:
                await rollouts.generate_batch()  # which learns of the chat template, and opens the connections
                turns, cpu, began = await _num_turns(fakes), time.process_time(), time.monotonic()
                for _ in range(num_batches):
                    await rollouts.generate_batch()
                cpu, seconds = time.process_time() - cpu, time.monotonic() - began
                turns = await _num_turns(fakes) - turns
    return {
        "num_episodes": num_batches * in_flight,
        "num_turns": turns,
        "turn_ms": 1e3 * cpu / turns,
        "share_of_a_core": cpu / seconds,
    }


async def _num_turns(fakes: Fakes) -> int:
    stats = await fakes.stats(fakes.addresses[0])
    return sum(stats["finished"].values())


if __name__ == "__main__":
    main()
