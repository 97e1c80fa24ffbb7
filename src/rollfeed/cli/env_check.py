"""``rollfeed env check``: whether environments keep their promises, and which of their levels are of no use."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from rollfeed.app.environments.conformance import Conformance, EnvironmentReport, check_environments
from rollfeed.base.cores import num_cores
from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_command, add_flags, add_numbers
from rollfeed.cli.progress import StatusLine
from rollfeed.environments import EnvironmentRegistry
from rollfeed.errors import ConfigError
from rollfeed.types.text import counted

_EPILOG = """each level is tried in two processes that are killed at its deadline: the same seed makes the same
problems; verdicts are the same after the params were JSON; known answers are right, blind ones no
more often than is declared; verifying is quick; the global random state is left alone. A level whose
problems cannot be made is quarantined, and those above it are not tried. The exit code is 1 where
something failed, or the lowest level of an environment is quarantined.

examples:
  rollfeed env check --all
  rollfeed env check puzzles.py:Palindromes --levels 0 3
  rollfeed env check 'rlve/*' --json
"""


def register_check(actions: Parsers) -> None:
    """Add the action to the parser."""
    parser = add_command(
        actions, "check", run_check, help="try whether environments keep their promises", epilog=_EPILOG
    )
    parser.add_argument(
        "ids", metavar="ID", nargs="*", help="environments: ids, patterns of ids, or paths such as file.py:name"
    )
    parser.add_argument("--levels", metavar="L", type=int, nargs="+", help="(default 0 1 2 4 8 and the hardest)")
    numbers: dict[str, tuple[int | float, str]] = {
        "--problems": (20, "problems of a level"),
        "--timeout": (10.0, "seconds for a level"),
        "--workers": (min(num_cores(), 8), "environments at once (default: the cores, at most 8)"),
    }
    add_numbers(parser, numbers)
    add_flags(parser, all="all that are installed", quiet=True, json="a report as one JSON object")


def chosen_ids(patterns: Sequence[str]) -> list[str]:
    """Return the environments that are meant, each once; paths as they are. Raises ConfigError if there is none."""
    registry, chosen = EnvironmentRegistry(), list[str]()
    for pattern in patterns:
        found = [each for each in registry.ids() if fnmatchcase(each, pattern)]
        if not found and ":" not in pattern:
            registry.get(pattern)  # says which is near
        chosen += found or [pattern]
    return list(dict.fromkeys(chosen))


def run_check(arguments: argparse.Namespace) -> int:
    """Try environments, and report. Raises ConfigError if none is chosen, or one is not there."""
    if bool(arguments.ids) is arguments.all:
        raise ConfigError("name the environments to check, or give --all")
    for option, value in (
        ("problems", arguments.problems),
        ("timeout", arguments.timeout),
        ("workers", arguments.workers),
    ):
        if not 0 < value <= 1_000_000:
            raise ConfigError(f"--{option} {value:g}: must be above 0, and at most a million")
    if wrong := [level for level in arguments.levels or () if level < 0]:
        raise ConfigError(f"--levels {wrong[0]}: must be at least 0")
    chosen, done = chosen_ids(["*"] if arguments.all else arguments.ids), list[EnvironmentReport]()
    line: StatusLine[list[EnvironmentReport]] = StatusLine(partial(_progress, len(chosen)), quiet=arguments.quiet)
    with line as progress:

        def tell(report: EnvironmentReport) -> None:
            done.append(report)
            progress(done)

        checking = check_environments(
            chosen,
            levels=arguments.levels,
            num_problems=arguments.problems,
            deadline_seconds=arguments.timeout,
            num_workers=arguments.workers,
            folders=[Path.cwd()],
            on_report=tell,
        )
        reports = asyncio.run(exit_codes.until_signal(checking))
    counts = Counter(report.outcome for report in reports)
    if arguments.json:
        totals = {outcome.value: counts[outcome] for outcome in Conformance}
        print(json.dumps({**totals, "environments": [_record(report) for report in reports]}))
    else:
        print("\n".join(line for report in reports for line in _lines(report)))
        print(f"{counted(len(reports), 'environment')}: {', '.join(f'{counts[each]} {each}' for each in Conformance)}")
    return exit_codes.DONE if counts[Conformance.PASSED] == len(reports) else exit_codes.FAILED


def _progress(num_environments: int, reports: Sequence[EnvironmentReport]) -> str:
    last = reports[-1]
    return f"{len(reports)} of {num_environments} environments, the last: {last.environment_id} {last.outcome}"


def _record(report: EnvironmentReport) -> dict[str, Any]:
    levels = [{**each.pop("numbers"), **each} for each in map(asdict, report.levels)]
    return {
        "id": report.environment_id,
        "version": report.version,
        "outcome": report.outcome,
        "error": report.error,
        "warnings": report.warnings,
        "levels": levels,
    }


def _lines(report: EnvironmentReport) -> Iterator[str]:
    tried = " ".join(str(each.level) for each in report.levels if each.outcome is Conformance.PASSED)
    yield f"{report.outcome:11}  {report.environment_id}" + (f"  levels {tried}" if tried else "")
    if report.error is not None:
        yield f"    {report.error}"
    for warning in report.warnings:
        yield f"    {warning}"
    for level in report.levels:
        for reason in level.reasons:
            yield f"    level {level.level} {level.outcome}: {reason}"
        for warning in level.warnings:
            yield f"    level {level.level}: {warning}"
