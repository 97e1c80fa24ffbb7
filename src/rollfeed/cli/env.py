"""``rollfeed env``: the environments, and problems of them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rollfeed.cli.evaluating import calibrate
from rollfeed.environments import EnvironmentRegistry, make_task
from rollfeed.errors import ConfigError
from rollfeed.protocols import Environment


def register(commands: Any) -> None:
    """Add the command and its subcommands to the parser."""
    parser = commands.add_parser("env", help="list environments, show a problem of one, or measure its levels")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="list all environments", epilog="example: rollfeed env list --json")
    listing.add_argument("--json", action="store_true", help="print one JSON list")
    listing.set_defaults(run=run_list)
    sample = actions.add_parser(
        "sample",
        help="show one problem, with its answer",
        epilog="example: rollfeed env sample core/add_numbers --level 2 --seed 7",
    )
    sample.add_argument("id", metavar="ID", help="environment, for example core/copy_text")
    sample.add_argument("--level", metavar="L", type=int, default=0, help="difficulty (default 0)")
    sample.add_argument("--seed", metavar="S", type=int, default=0, help="run seed (default 0)")
    sample.add_argument("--index", metavar="I", type=int, default=0, help="number of the problem (default 0)")
    sample.add_argument("--json", action="store_true", help="print one JSON object")
    sample.set_defaults(run=run_sample)
    calibrate.register(actions)


def run_list(arguments: argparse.Namespace) -> int:
    """Print the environments."""
    environments = _listed(EnvironmentRegistry())
    if arguments.json:
        print(json.dumps([_row(name, each) for name, each in environments.items()]))
        return 0
    width = max(map(len, environments))
    for name, each in environments.items():
        print(f"{name:{width}}  {each if isinstance(each, ConfigError) else each.summary}")
    return 0


def _listed(registry: EnvironmentRegistry) -> dict[str, Environment | ConfigError]:
    """Return all environments by id; of one that its package does not give, the error."""
    found: dict[str, Environment | ConfigError] = {}
    for environment_id in registry.ids():
        try:
            found[environment_id] = registry.get(environment_id)
        except ConfigError as error:
            found[environment_id] = error
    return found


def _row(name: str, found: Environment | ConfigError) -> dict[str, Any]:
    if isinstance(found, ConfigError):
        return {"id": name, "error": str(found)}
    return {"id": name, "version": found.version, "max_level": found.max_level, "summary": found.summary}


def run_sample(arguments: argparse.Namespace) -> int:
    """Print one problem.

    Raises:
        ConfigError: If there is no such environment or level.
    """
    environment = EnvironmentRegistry().get(arguments.id)
    task = make_task(environment, level=arguments.level, index=arguments.index, run_seed=arguments.seed)
    if arguments.json:
        record = {
            "id": task.environment,
            "version": task.version,
            "level": task.level,
            "seed": task.seed,
            "question": task.question,
            "params": task.params,
            "answer": task.answer,
        }
        print(json.dumps(record, ensure_ascii=False))
        return 0
    print(f"{task.environment} level {task.level} seed {task.seed}\n\n{task.question}\n")
    print(f"answer: {task.answer if task.answer is not None else 'any that passes the verifier'}")
    return 0
