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
