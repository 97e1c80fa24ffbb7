"""``rollfeed train`` as a process, timed, with the curve it leaves; shared by the benches of the examples."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rollfeed.benchmarks.machine import machine

OfSeed: TypeAlias = Callable[[int, Path, Sequence[str]], dict[str, Any]]
_FIRST_EVALUATION = "after 0 batches"


def train(
    settings: Path,
    out: Path,
    *,
    seed: int,
    overrides: Sequence[str] = (),
    program: Sequence[str] = ("-m", "rollfeed", "train"),
) -> dict[str, Any]:
    """Run the command to its end; ``program`` is what Python is asked for.

    ``seconds`` are those of the whole process; ``seconds_before_training`` those until the first evaluation was done:
    start, model, warm-up and that evaluation. ``change`` is that of the accuracy from the first evaluation to the last,
    over the same prompts, with its paired interval.
    """
    command = [sys.executable, *program, str(settings), "--out", str(out)]
    for override in (f"seed={seed}", *overrides):
        command += ["--set", override]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    before: float | None = None
    # Plug-ins are looked for where a command is run, and some of those of the benches are in this folder.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parent
    ) as process:
        for line in process.stdout or ():
            if before is None and line.startswith(_FIRST_EVALUATION):
                before = time.monotonic() - began
    seconds = time.monotonic() - began
    if process.returncode or before is None:
        raise SystemExit(f"{shlex.join(command)} ended with {process.returncode}")
    evaluations = records(out / "eval.jsonl")
    ((name, last),) = evaluations[-1]["sets"].items()
    return {
        "seed": seed,
        "overrides": list(overrides),
        "seconds": round(seconds, 1),
        "seconds_before_training": round(before, 1),
        "num_prompts": last["num_prompts"],
        "num_missing": last["num_missing"],
        "change": evaluations[-1]["change"][name],
        "curve": [_point(record) for record in evaluations],
    }


def seeds_and_a_control(
    description: str | None, of_seed: OfSeed, control: Sequence[str], *, settings: Path, sign: str, **told: Any
) -> None:
    """Write what :func:`measured` returns to the file that the command line names; ``description`` is of that."""
    arguments = arguments_of(description)
    record = measured(arguments.seeds, of_seed, control, settings=settings, sign=sign, **told)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def arguments_of(description: str | None, *, tasks: Sequence[str] = ()) -> argparse.Namespace:
    """Return what the command line says: a file, seeds, and where there are several tasks, which."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    if tasks:
        parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks)
    return parser.parse_args()


def measured(
    seeds: Sequence[int], of_seed: OfSeed, control: Sequence[str], *, settings: Path, sign: str, **told: Any
) -> dict[str, Any]:
    """Return what runs of several seeds come to, and a control of the first one; ``sign`` says if a run has learned.

    Args:
        seeds: Of the runs.
        of_seed: Runs the command with a seed, a folder and overrides; returns its record.
        control: Overrides of the control.
        settings: The file that is run.
        sign: Key of records: true of each run and not of the control where the bench is met.
        told: What else the record says.
    """
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        runs = [of_seed(seed, Path(temporary, f"seed-{seed}"), ()) for seed in seeds]
        controlled = of_seed(seeds[0], Path(temporary, "control"), control)
    return {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine() | {"load_average_before": load_before},
        "settings": settings.read_text(encoding="utf-8"),
        **told,
        "runs": runs,
        "control": controlled,
        "met": all(run[sign] for run in runs) and not controlled[sign],
    }


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tell(record: dict[str, Any]) -> None:
    """Print what a run came to, on one line."""
    short = {name: value for name, value in record.items() if name != "curve"}
    print(json.dumps({**short, "last": record["curve"][-1]} if "curve" in record else short), flush=True)


def _point(record: dict[str, Any]) -> dict[str, float]:
    (found,) = record["sets"].values()
    numbers = ("accuracy", "accuracy_low", "accuracy_high", "reward_mean", "response_length_mean", "truncated_ratio")
    return {"batches": record["step"], **{name: found[name] for name in numbers}}
