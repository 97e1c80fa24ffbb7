"""``rollfeed check``: everything that can be known before an engine starts."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rollfeed.cli.arguments import Parsers, add_command, add_flags, add_path, add_settings_arguments, load_spec
from rollfeed.cli.resolved import resolved_text
from rollfeed.config import RunSpec
from rollfeed.errors import EngineUnavailableError, RunDirectoryError

if TYPE_CHECKING:
    from rollfeed.cli.asked_servers import ServerAnswer

_EXAMPLES = """\
examples:
  rollfeed check examples/demo/demo.toml --set rollout.num_rollout=3
  rollfeed check run.toml --set seed=3 --print > resolved.toml      all settings, and which of them were given where
"""


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "check",
        run,
        description="Check a settings file and all it names, as `rollfeed run` would find it: data files, plug-ins, "
        "filters, model, run directory; with [train] and [eval] what `rollfeed train` and `rollfeed eval` would find.",
        epilog=_EXAMPLES,
    )
    add_settings_arguments(parser)
    add_path(parser, "--out", "DIR", "also check that a run could start or go on there")
    resolved = "print all settings, defaults too, as a settings file, and check nothing that they name"
    servers = "also ask the servers of [engine] (model, version, tokens, tokenizer, routes for weights) and all judges"
    replaces = "the run would replace what is in --out"
    add_flags(parser, print=resolved, overwrite=replaces, servers=servers, json="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Check and say what a run would do. Raises ConfigError with everything that is wrong, a line each."""
    spec = load_spec(arguments.files, arguments.overrides)
    if arguments.print:
        if arguments.json:
            print(json.dumps(spec.settings.resolved()))
        else:
            print(resolved_text(spec.settings, files=arguments.files, overrides=arguments.overrides), end="")
        return 0
    _check(spec, arguments)
    return 0


def _check(spec: RunSpec, arguments: argparse.Namespace) -> None:
    # Fetched here, as it takes a while that mistakes in settings need not wait for.
    from rollfeed import app
    from rollfeed.cli.checking import check

    if arguments.out is not None:
        out, overwrite = arguments.out, arguments.overwrite
        if spec.settings.trains:
            problem = app.directory_problem(spec, out, overwrite=overwrite)
        else:
            problem = app.run_problem(spec, out, overwrite=overwrite, step=None)
        if problem is not None:
            raise RunDirectoryError(problem)
    plan = check(spec, name=", ".join(map(str, arguments.files)), tells=not arguments.json)
    answers: list[ServerAnswer] = []
    if arguments.servers:
        from rollfeed.cli.asked_servers import ask_judges, ask_servers, ask_teacher

        judges = ask_judges(spec)
        model = app.load_settings_model(spec.settings)
        teachers = list(ask_teacher(spec.settings, model))
        if spec.settings.engine.servers or not (judges or teachers):
            answers = ask_servers(spec.settings, model)
        plan |= {"judges": judges, "teachers": teachers} | {
            "servers": [asdict(each) for each in answers],
            "ok": not any(each.problems for each in answers),
        }
    if arguments.json:
        print(json.dumps(plan))
    else:
        print("".join(f"judge    {each} answers\n" for each in plan.get("judges", ())), end="")
        print("".join(f"teacher  {each} scores\n" for each in plan.get("teachers", ())), end="")
        print("".join(f"server   {each.address}: {', '.join(each.told)}\n" for each in answers if each.told), end="")
    if problems := [problem for each in answers for problem in each.problems]:
        raise EngineUnavailableError("\n".join(problems))
