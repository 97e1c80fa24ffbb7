"""``rollfeed train``: make batches and train on them."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
from dataclasses import asdict

from rollfeed import app
from rollfeed.app.training import run_curves, where_it_goes_on
from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_command, add_settings_arguments, load_spec
from rollfeed.cli.printed import printed_lines
from rollfeed.cli.run import add_run_directory, console_of, default_directory, ended_view
from rollfeed.cli.show import eval_view
from rollfeed.cli.show_run import run_advice
from rollfeed.cli.training_view import TrainingView
from rollfeed.config import RolloutMode
from rollfeed.errors import RunDirectoryError
from rollfeed.report import CURVE_PAGE
from rollfeed.store import RunReader
from rollfeed.store.layout import PRINTED
from rollfeed.types.text import counted


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "train",
        run,
        description="Generate rollouts, train on each batch, and put the new weights into the engine. An unfinished "
        "run goes on from its last checkpoint, a finished one when rollout.num_rollout is raised.",
        epilog="example: rollfeed train examples/reverse/train.toml --out runs/reverse --set seed=1",
    )
    add_settings_arguments(parser)
    add_run_directory(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train, and say where the result is.

    Raises:
        ConfigError: If anything is wrong that can be known beforehand; nothing has been started.
        RollfeedError: If the run fails.
    """
    spec = load_spec(arguments.files, arguments.overrides)
    settings = spec.settings
    out = arguments.out or default_directory(arguments.files)
    if problem := app.directory_problem(spec, out, overwrite=arguments.overwrite):
        raise RunDirectoryError(problem)
    prepared = app.prepare(spec, out=None if arguments.overwrite else out)
    console = console_of(arguments)
    console.print(f"run directory: {out}")
    if not arguments.overwrite and (begins := where_it_goes_on(out)) is not None:
        console.print(begins)
    if (warm_up := settings.train.warm_up) is not None:
        console.print(
            f"warm-up: supervised, {warm_up.wrong_share:.0%} of the labels wrong on purpose, until "
            f"{warm_up.stop_accuracy:.0%} of sampled answers are right"
        )

    view = TrainingView(
        console,
        name=str(out),
        num_batches=prepared.num_batches,
        rollout_batch_size=settings.rollout.rollout_batch_size,
        read_curves=lambda: run_curves(out),
        is_live=not arguments.json,
        has_rewards=settings.rollout.mode is not RolloutMode.SFT,
    )
    with view, printed_lines(out / PRINTED, console, verbose=arguments.verbose):
        training = app.train(
            prepared,
            out=out,
            overwrite=arguments.overwrite,
            observers=[view],
            on_step=view.on_step,
            on_evaluation=view.on_evaluation,
            on_warm_up=lambda probe: view.warming_up(probe.num_updates, probe.accuracy, probe.goal),
        )
        options = [word for override in arguments.overrides for word in ("--set", override)]
        again = shlex.join(["rollfeed", "train", *map(str, arguments.files), *options, "--out", str(out)])
        summary = asyncio.run(exit_codes.until_signal(training, said=f"stopped; {again} goes on"))
    with RunReader(summary.directory) as reader:
        evaluations, advice = reader.evaluations(), run_advice(reader)
    if arguments.json:
        found = {**ended_view(summary), "eval": eval_view(evaluations), "advice": [asdict(each) for each in advice]}
        print(json.dumps(found))
    else:
        view.print_result()
        if summary.early_end is not None:
            print(summary.early_end)
        resumed = f" ({summary.num_resumed_steps} of them before)" if summary.num_resumed_steps else ""
        batches = counted(summary.num_steps, "batch", "batches")
        print(f"{batches}{resumed} in {summary.directory}; curve: {summary.directory / CURVE_PAGE}")
        for each in advice:
            print(f"advice: {each.text}")
    return 0
