"""``rollfeed check``: everything that can be known before an engine starts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rollfeed import app
from rollfeed.cli.arguments import add_settings_arguments, settings_of
from rollfeed.errors import RunDirectoryError
from rollfeed.store import RunDirectory


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "check",
        help="check a settings file, its data, plug-ins and model without starting anything",
        description="Check a settings file and all it names: data files, plug-ins, filters, model, run directory.",
        epilog="example: rollfeed check examples/demo/demo.toml --set rollout.num_rollout=3",
    )
    add_settings_arguments(parser)
    parser.add_argument("--out", metavar="DIR", type=Path, help="also check that a run could start or go on there")
    parser.add_argument("--overwrite", action="store_true", help="the run would replace what is in --out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check and say what a run would do.

    Raises:
        ConfigError: With everything that is wrong, a line each.
    """
    settings, folders = settings_of(arguments)
    if arguments.out is not None:
        problem = RunDirectory.problem(arguments.out, identity=settings.identity(), overwrite=arguments.overwrite)
        if problem is not None:
            raise RunDirectoryError(problem)
    prepared = app.prepare(settings, folders=folders)
    eval_sets = []
    if settings.eval.has_sets:
        evaluation = app.prepare_evaluation(
            settings.eval,
            config=prepared.config,
            tokenizer=prepared.model.tokenizer,
            context_length=settings.engine.context_length,
            folders=folders,
        )
        eval_sets = [each.name for each in evaluation.sets]
    rollout = settings.rollout
    plan = {
        "ok": True,
        "model": str(prepared.model.checkpoint),
        "sources": app.source_names(settings),
        "eval_sets": eval_sets,
        "num_rollout": rollout.num_rollout,
        "rollout_batch_size": rollout.rollout_batch_size,
        "n_samples_per_prompt": rollout.n_samples_per_prompt,
        "deterministic": rollout.deterministic,
    }
    if arguments.json:
        print(json.dumps(plan))
        return 0
    print(f"{arguments.file}: all right")
    print(f"model    {settings.model.checkpoint} ({prepared.model.checkpoint})")
    print(f"prompts  {', '.join(app.source_names(settings))}")
    if eval_sets:
        print(f"eval     {', '.join(eval_sets)}")
    print(
        f"steps    {rollout.num_rollout} of {rollout.rollout_batch_size} groups x {rollout.n_samples_per_prompt} "
        f"rollouts, {rollout.first_submission} prompts submitted at first"
    )
    return 0
