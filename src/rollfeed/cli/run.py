"""``rollfeed run``: make all steps of a run."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from rollfeed import app
from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_command, add_flags, add_path, add_settings_arguments, load_spec
from rollfeed.cli.printed import printed_lines
from rollfeed.cli.progress import ProgressReporter
from rollfeed.cli.show_run import run_advice
from rollfeed.errors import ConfigError, RunDirectoryError
from rollfeed.store import RunReader
from rollfeed.store.layout import PRINTED
from rollfeed.types.text import counted

_EXAMPLES = """\
examples:
  rollfeed run examples/demo/demo.toml --out runs/first --set rollout.num_rollout=3
  rollfeed run --resume runs/first                 go on after its last step
  rollfeed run --resume runs/first --step 1        keep steps 0 and 1, make the others anew
"""


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "run",
        run,
        description="Generate rollouts, step after step, into a run directory. An unfinished run is continued.",
        epilog=_EXAMPLES,
    )
    add_settings_arguments(parser, needs_file=False)
    add_path(parser, "--resume", "DIR", "go on with the run in DIR, with the settings stored there; no FILE is needed")
    parser.add_argument(
        "--step",
        metavar="N",
        type=int,
        help="with --resume: first go back to the state after step N, the last step that is kept; the files of later "
        "steps are removed, and they are made anew. A finished run is gone on with, too",
    )
    add_run_directory(parser)


def add_run_directory(parser: argparse.ArgumentParser) -> None:
    """Add where a run goes, and what is printed of it."""
    add_path(parser, "--out", "DIR", "run directory (default: runs/<file>-<date>-<time>)")
    end = "one JSON object at the end; progress goes to stderr"
    verbose = "show what reward functions and environments print, which goes to rewards.log"
    add_flags(parser, overwrite="replace the run that is in --out", verbose=verbose, quiet=True, json=end)


def console_of(arguments: argparse.Namespace) -> Console:
    """Return where progress goes."""
    return Console(stderr=arguments.json, soft_wrap=True, highlight=False, markup=False, quiet=arguments.quiet)


def run(arguments: argparse.Namespace) -> int:
    """Run, and say where the result is.

    Raises:
        ConfigError: If anything is wrong that can be known beforehand; nothing has been started.
        RollfeedError: If the run fails.
    """
    _check_combination(arguments)
    if arguments.resume is not None and arguments.files:
        RunReader(arguments.resume).close()  # there must be a run to go on with
    if arguments.files:
        spec = load_spec(arguments.files, arguments.overrides)
    else:
        spec = app.stored_spec(arguments.resume, arguments.overrides)
    out = arguments.resume or arguments.out or default_directory(arguments.files)
    if problem := app.run_problem(spec, out, overwrite=arguments.overwrite, step=arguments.step):
        raise RunDirectoryError(problem)
    prepared = app.prepare(spec, out=None if arguments.overwrite else out)
    console = console_of(arguments)
    reporter = ProgressReporter(console, spec.settings.rollout, reward_key=spec.settings.reward.reward_key)
    console.print(f"run directory: {out}")
    with reporter, printed_lines(out / PRINTED, console, verbose=arguments.verbose):
        making = app.run(prepared, out=out, overwrite=arguments.overwrite, step=arguments.step, observers=[reporter])
        summary = asyncio.run(exit_codes.until_signal(making, said=f"stopped; rollfeed run --resume {out} goes on"))
    with RunReader(summary.directory) as reader:
        advice = run_advice(reader)
    if arguments.json:
        print(json.dumps({**ended_view(summary), "advice": [asdict(each) for each in advice]}))
    else:
        if summary.early_end is not None:
            print(summary.early_end)
        resumed = f" ({summary.num_resumed_steps} of them before)" if summary.num_resumed_steps else ""
        steps, out = counted(summary.num_steps, "step"), summary.directory
        print(f"{steps}{resumed} in {out}; look with: rollfeed show {out}")
        for each in advice:
            print(f"advice: {each.text}")
    return 0


def ended_view(summary: app.RunSummary) -> dict[str, Any]:
    """Return a run that has ended as JSON values: counts, the numbers of its steps, and where it has come to.

    ``accuracy`` is the last evaluation's; where nothing is evaluated, the share of right answers in the last batch.
    """
    with RunReader(summary.directory) as reader:
        records, evaluations, trained = reader.steps(), reader.evaluations(), reader.updates()
    steps = []
    for record in records:
        update = trained.get(record.step, {})
        numbers = {
            "reward": record.metrics.get("rollout/reward_mean"),
            "accuracy": record.metrics.get("rollout/correct_ratio"),
            "loss": update.get("train/loss"),
            "grad_norm": update.get("train/grad_norm"),
            "response_length": record.metrics.get("rollout/response_length_mean"),
            "seconds": record.metrics.get("time/total_seconds"),
        }
        told = {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}
        steps.append({"step": record.step, **told})
    last = steps[-1] if steps else {}
    accuracy = evaluations[-1]["accuracy"] if evaluations else last.get("accuracy")
    end = {"accuracy": accuracy, "reward": last.get("reward"), "loss": last.get("loss")}
    return {**asdict(summary), "directory": str(summary.directory), **end, "steps": steps}


def _check_combination(arguments: argparse.Namespace) -> None:
    """Refuse options that contradict each other."""
    if arguments.resume is None and arguments.step is not None:
        raise ConfigError(f"--step {arguments.step}: says where --resume DIR goes on; give --resume too")
    if arguments.resume is None and not arguments.files:
        raise ConfigError("nothing to run: give a settings file, or --resume DIR to go on with a run")
    if arguments.resume is not None and arguments.out is not None:
        raise ConfigError(f"--resume {arguments.resume}: goes on in that directory; leave out --out")
    if arguments.resume is not None and arguments.overwrite:
        raise ConfigError(f"--resume {arguments.resume}: goes on with the run there; leave out --overwrite")


def default_directory(files: Sequence[Path], *, kind: str = "") -> Path:
    """Return a new directory below ``runs``, named after the settings files, what is done and the time."""
    return Path("runs") / f"{'-'.join(file.stem for file in files)}{kind}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
