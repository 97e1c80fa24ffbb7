"""``rollfeed env plot``: how difficult environments became over a run, and how many answers were right."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Console

from rollfeed.cli.arguments import Parsers, add_command, add_flags, add_path, path_argument
from rollfeed.errors import ConfigError, suggestion
from rollfeed.report.level_curves import environment_curves
from rollfeed.report.level_report import difficulty_lines, write_difficulty
from rollfeed.store import RunReader

_MOST_STATES = 120
"""Steps whose states are read, evenly over the run."""
_EPILOG = """the accuracy is that of all scored answers at all levels, filtered or not, between two points of the curve.

examples:
  rollfeed env plot runs/band
  rollfeed env plot runs/band 'core/*' --out plots
"""


def register_plot(actions: Parsers) -> None:
    """Add the action to the parser."""
    parser = add_command(
        actions,
        "plot",
        run_plot,
        help="draw difficulty and accuracy of adaptive environments over a run",
        epilog=_EPILOG,
    )
    parser.add_argument("directory", type=path_argument, metavar="RUN", help="the directory of a run")
    parser.add_argument("ids", metavar="ID", nargs="*", help="environments: ids or patterns of ids (default: all)")
    add_path(parser, "--out", "DIR", "where difficulty.html and difficulty.png are written (default: RUN)")
    add_flags(parser, json="the points of the curves as one JSON object, and write nothing")


def run_plot(arguments: argparse.Namespace) -> int:
    """Print the curves, and draw them.

    Raises:
        ConfigError: If the run has no such environment.
        RunDirectoryError: If it is no run, or its files cannot be read.
    """
    with RunReader(arguments.directory) as reader:
        curves = environment_curves(_states(reader))
    if not curves:
        raise ConfigError(
            f"{arguments.directory}: no step of the run has a state of adaptive environments: only runs with "
            "[prompts.adaptive] can be plotted"
        )
    for pattern in arguments.ids:
        if not any(fnmatchcase(name, pattern) for name in curves):
            raise ConfigError(f"{pattern!r}: the run has no such environment; {suggestion(pattern, curves)}")
    if arguments.ids:
        chosen = [name for name in curves if any(fnmatchcase(name, pattern) for pattern in arguments.ids)]
        curves = {name: curves[name] for name in chosen}
    if arguments.json:
        names = ("difficulty", "accuracy")
        print(
            json.dumps(
                {
                    name: {key: [point[:2] for point in points] for key, points in zip(names, each, strict=True)}
                    for name, each in curves.items()
                }
            )
        )
        return 0
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in difficulty_lines(curves, width=console.width, ascii_only=console.options.ascii_only):
        console.print(line)
    out = arguments.out or arguments.directory
    out.mkdir(parents=True, exist_ok=True)
    for path in write_difficulty(out, curves, title=arguments.directory.resolve().name):
        console.print(f"wrote {path}")
    return 0


def _states(reader: RunReader) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield states of the source of adaptive environments, behind the number of batches before each."""
    steps = [record.step for record in reader.steps()]
    every = -(-len(steps) // _MOST_STATES) or 1
    for step in steps[::-1][::every][::-1]:
        found = reader.state(step).source.get("sources", {}).get("adaptive", {})
        if "environments" in found:
            yield step + 1, found
