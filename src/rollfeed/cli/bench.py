"""``rollfeed bench``: measure this machine, ours and a reference in turn."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from rollfeed import app
from rollfeed.benchmarks.engine import Workload, bench_engine
from rollfeed.engine import DEFAULT_MODEL
from rollfeed.errors import ConfigError


def register(commands: Any) -> None:
    """Add the command and its subcommands to the parser."""
    parser = commands.add_parser("bench", help="measure speed as ratios to a reference, in one run")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    engine = actions.add_parser(
        "engine",
        help="the embedded engine beside transformers' generate()",
        description="Decode the same prompts with the embedded engine and transformers in turn. Takes minutes.",
        epilog="example: rollfeed bench engine --threads 1 2 --json > bench/engine.json",
    )
    engine.add_argument(
        "--threads", type=int, nargs="+", default=[2], metavar="N", help="numbers of threads (default 2)"
    )
    engine.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="M", help="name, folder or GGUF file (default: the built-in model)"
    )
    engine.add_argument("--new-tokens", type=int, default=128, metavar="N", help="tokens of a response (default 128)")
    engine.add_argument("--repetitions", type=int, default=3, metavar="N", help="of each measurement (default 3)")
    engine.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    engine.set_defaults(run=run_engine)
    _register_rewards(actions)
    _register_client(actions)


def _register_rewards(actions: Any) -> None:
    rewards = actions.add_parser(
        "rewards",
        help="the reward hub beside math-verify",
        description="Grade the same answers with the reward hub and with math-verify in one process, in turn.",
        epilog="example: rollfeed bench rewards --json > bench/rewards.json",
    )
    rewards.add_argument("--inputs", type=int, default=1_000, metavar="N", help="responses (default 1000)")
    rewards.add_argument("--repetitions", type=int, default=3, metavar="N", help="of each measurement (default 3)")
    rewards.add_argument("--seed", type=int, default=0, metavar="N", help="of the inputs (default 0)")
    rewards.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    rewards.set_defaults(run=run_rewards)


def _register_client(actions: Any) -> None:
    client = actions.add_parser(
        "client",
        help="the SGLang client under a whole run beside a plain httpx client",
        description="Make rollouts on a fake server that takes no time, with ours and with httpx, json and lists, in "
        "turn. Takes half an hour for everything.",
        epilog="example: rollfeed bench client --tokens 8000 --in-flight 512 --json",
    )
    client.add_argument(
        "--tokens", type=int, nargs="+", metavar="N", default=[1000, 8000], help="of a response (default 1000 8000)"
    )
    client.add_argument(
        "--in-flight",
        type=int,
        nargs="+",
        metavar="N",
        default=[128, 512, 2048],
        help="requests at once (default 128 512 2048)",
    )
    client.add_argument("--repetitions", type=int, default=3, metavar="N", help="of each measurement (default 3)")
    client.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and sampling (default 0)")
    client.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    client.set_defaults(run=run_client)


def run_engine(arguments: argparse.Namespace) -> int:
    """Measure the embedded engine."""
    workload = Workload(new_tokens=arguments.new_tokens, repetitions=arguments.repetitions)
    result = bench_engine(
        app.load_model(arguments.model),
        threads=arguments.threads,
        workload=workload,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    result |= {"command": " ".join(["rollfeed", *sys.argv[1:]]), "machine": machine()}
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    for row in result["by_threads"]:
        for precision, figures in row["by_precision"].items():
            print(
                f"{row['threads']} threads, {precision}: {figures['ratio']:.2f} times as fast as generate() "
                f"({figures['tokens_per_second']:.0f} tokens/s), "
                f"logprobs within {figures['max_logprob_difference']:.1e}, "
                f"KL {figures['kl']:.4f} a token, "
                f"greedy outputs {'identical' if figures['greedy_outputs_identical'] else 'DIFFERENT'}"
            )
    return 0


def run_rewards(arguments: argparse.Namespace) -> int:
    """Measure the reward hub.

    Raises:
        ConfigError: If an option is wrong, or the reference is not installed.
    """
    from rollfeed.benchmarks.rewards import Workload as RewardWorkload
    from rollfeed.benchmarks.rewards import bench_rewards

    if arguments.inputs < 1 or arguments.repetitions < 1:
        raise ConfigError("--inputs and --repetitions must be at least 1")
    workload = RewardWorkload(num_inputs=arguments.inputs, repetitions=arguments.repetitions, seed=arguments.seed)
    result = bench_rewards(workload, progress=lambda line: print(line, file=sys.stderr, flush=True))
    result |= {"command": " ".join(["rollfeed", *sys.argv[1:]]), "machine": machine()}
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    print(
        f"{result['hub_ratio']:.1f} times {result['cores']} cores of math-verify "
        f"({result['math_verify_verdicts_per_second']:.0f} verdicts/s in one process)"
    )
    for row in result["by_hanging_share"]:
        print(
            f"hub, {row['hanging_share']:.0%} hanging: {row['verdicts_per_second']:.0f} verdicts/s, "
            f"{row['lost_seconds']:.1f} s lost of {row['deadlines_seconds']:.1f} s of deadlines"
        )
    return 0


def run_client(arguments: argparse.Namespace) -> int:
    """Measure the SGLang client.

    Raises:
        ConfigError: If an option is wrong, or the reference is not installed.
    """
    from rollfeed.benchmarks.client import ClientWorkload, bench_client

    if min(*arguments.tokens, *arguments.in_flight, arguments.repetitions) < 1:
        raise ConfigError("--tokens, --in-flight and --repetitions must be at least 1")
    result = bench_client(
        tokens=arguments.tokens,
        in_flight=arguments.in_flight,
        workload=ClientWorkload(repetitions=arguments.repetitions, seed=arguments.seed),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    result |= {"command": " ".join(["rollfeed", *sys.argv[1:]]), "machine": machine()}
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    for cell in result.get("cells", [result]):
        print(
            f"{cell['tokens']} tokens, {cell['in_flight']} in flight: {cell['ratio']:.1f} times below httpx, "
            f"{cell['cpu_seconds_per_million_tokens']:.2f} CPU seconds per million tokens, "
            f"{cell['bytes_per_token']:.1f} bytes a token, "
            f"{cell['peak_memory_mb']:.0f} MB of memory (httpx {cell['reference_peak_memory_mb']:.0f} MB)"
        )
    return 0


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }
