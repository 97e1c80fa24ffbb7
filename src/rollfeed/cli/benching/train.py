"""``rollfeed bench train``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rollfeed import app
from rollfeed.cli.benching.machine import machine
from rollfeed.engine import DEFAULT_MODEL
from rollfeed.errors import ConfigError


def register(actions: Any) -> None:
    """Add the action to the parser of ``rollfeed bench``."""
    train = actions.add_parser(
        "train",
        help="steps of training beside what their matrix products take",
        description="Train on a few batches with the embedded engine, in one process on the CPU, and measure "
        "generation, scoring, training and publishing; the passes are compared with plain matrix products of the same "
        "shapes. Takes a minute or two with the built-in model.",
        epilog="example: rollfeed bench train --steps 5 --threads 2 --json",
    )
    train.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="M", help="name, folder or GGUF file (default: the built-in model)"
    )
    train.add_argument("--steps", type=int, default=3, metavar="N", help="measured, after one that is not (default 3)")
    train.add_argument("--threads", type=int, default=2, metavar="N", help="of engine and trainer (default 2)")
    train.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and sampling (default 0)")
    train.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    train.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure training.

    Raises:
        ConfigError: If an option is wrong, or something is not installed.
    """
    if min(arguments.steps, arguments.threads) < 1 or arguments.seed < 0:
        raise ConfigError("--steps and --threads must be at least 1, --seed at least 0")
    try:
        # Here, because it brings torch, which the command line does without.
        from rollfeed.benchmarks.training.bench import TrainWorkload, bench_train
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"training needs {error.name}, which is not installed: pip install 'rollfeed[local]'"
        ) from None
    result = bench_train(
        app.load_model(arguments.model),
        workload=TrainWorkload(num_steps=arguments.steps, threads=arguments.threads, seed=arguments.seed),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    result |= {"command": " ".join(["rollfeed", *sys.argv[1:]]), "machine": machine()}
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    parts = ", ".join(f"{name} {share:.0%}" for name, share in result["parts"].items())
    share = result["share_of_bound"]
    print(f"{result['step_seconds']:.1f} s a step ({parts})")
    print(
        f"{result['output_tokens_per_second']:.0f} output tokens/s of step time, "
        f"{result['trained_tokens_per_second']:.0f} trained tokens/s of training time"
    )
    print(
        "nothing was trained on" if share is None else f"forward and backward at {share:.0%} of their matrix products"
    )
    return 0
