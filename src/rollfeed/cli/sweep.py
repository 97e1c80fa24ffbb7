"""``rollfeed sweep``: runs that differ in a few settings, one after another, and one table of them."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import FrameType

from rollfeed import app
from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_command, add_settings_arguments, load_spec
from rollfeed.cli.run import add_run_directory, default_directory
from rollfeed.config import RunSpec
from rollfeed.config.resuming import stored_identity
from rollfeed.errors import ConfigError, RunDirectoryError
from rollfeed.store import RunReader, RunStatus
from rollfeed.store.layout import JOURNAL
from rollfeed.types.text import counted

_EPILOG = """Each combination of values is a run in a folder of its own below --out, named after them: one of
`rollfeed train` where the settings have [train], else of `rollfeed run`. The same command goes on where it was
stopped, and makes no finished run again. A run that fails does not end the others; the exit code is 1 then.

example: rollfeed sweep train.toml --grid train.optimizer.learning_rate=1e-5,3e-5 --grid seed=1,2 --out runs/rates
"""
_LONGEST_NAME = 120
_BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}


@dataclass(frozen=True, slots=True)
class _Planned:
    """One combination of values."""

    values: Mapping[str, str]
    """As they were given, by key."""
    spec: RunSpec
    out: Path
    is_done: bool


@dataclass(frozen=True, slots=True)
class _Row:
    """One combination of values, and what its run has come to."""

    settings: Mapping[str, str]
    directory: str
    status: str
    steps: int
    reward: float | None
    """Mean of the last batch."""
    accuracy: float | None
    """Of the last evaluation."""
    cause: str | None
    """Why it failed or ended early."""


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "sweep",
        run,
        description="Make a run of every combination of values, one after another, and print one table of them.",
        epilog=_EPILOG,
    )
    add_settings_arguments(parser)
    told = "values that a setting takes in turn; may be given several times, for all combinations"
    parser.add_argument("--grid", metavar="KEY=A,B", action="append", required=True, help=told)
    add_run_directory(parser)


def run(arguments: argparse.Namespace) -> int:
    """Make the runs that are not finished, and print what all have come to.

    Raises:
        ConfigError: If a setting is wrong in any of them, or a folder holds something else; nothing has been started.
    """
    out = arguments.out or default_directory(arguments.files, kind="-sweep")
    planned = _plan(arguments, out)
    for number, each in enumerate(planned, start=1):
        if each.is_done:
            continue
        if not arguments.quiet:
            print(f"run {number} of {len(planned)}: {each.out}", file=sys.stderr)
        if _made(each, arguments) == exit_codes.INTERRUPTED:
            raise KeyboardInterrupt(f"stopped; the same command with --out {out} goes on")
    rows = [_row(each) for each in planned]
    if arguments.json:
        print(json.dumps({"out": str(out), "runs": [asdict(row) for row in rows]}))
    else:
        print("\n".join(_lines(rows, out)))
    return exit_codes.DONE if all(row.status == RunStatus.FINISHED for row in rows) else exit_codes.FAILED


def _plan(arguments: argparse.Namespace, out: Path) -> list[_Planned]:
    grid = _grid(arguments.grid)
    planned, problems = list[_Planned](), dict[str, None]()
    for values in product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        overrides = [*arguments.overrides, *(f"{key}={value}" for key, value in chosen.items())]
        try:
            spec, folder = load_spec(arguments.files, overrides), out / _name(chosen)
            is_done = not arguments.overwrite and _is_done(spec, folder)
            if not is_done and (problem := _problem(spec, folder, overwrite=arguments.overwrite)):
                raise RunDirectoryError(problem)
        except ConfigError as error:
            problems |= dict.fromkeys(str(error).splitlines())
            continue
        planned.append(_Planned(chosen, spec, folder, is_done))
    if problems:
        raise ConfigError("\n".join(problems))
    return planned


def _grid(given: Sequence[str]) -> dict[str, list[str]]:
    grid: dict[str, list[str]] = {}
    for each in given:
        key, equals, text = each.partition("=")
        key, values = key.strip(), list(_values(text))
        if not equals or not key or not all(values):
            raise ConfigError(f"--grid {each!r}: write it as section.key=a,b, for example seed=1,2")
        if key in grid or len(set(values)) < len(values):
            raise ConfigError(
                f"--grid {each!r}: {'the key' if key in grid else 'a value'} is given twice; leave one out"
            )
        grid[key] = values
    return grid


def _values(text: str) -> Iterator[str]:
    """Yield what commas part that stand in no brackets and no quotes."""
    depth, quote, value = 0, "", ""
    for character in text:
        if character == "," and not depth and not quote:
            yield value.strip()
            value = ""
            continue
        value += character
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += _BRACKETS.get(character, 0)
    yield value.strip()


def _name(values: Mapping[str, str]) -> str:
    """Return the name of a run's folder: keys without their tables, and values."""
    last = [key.rpartition(".")[2] for key in values]
    keys = last if len(set(last)) == len(last) else list(values)
    told = ",".join(f"{key}={value}" for key, value in zip(keys, values.values(), strict=True))
    name = re.sub(r"[^\w.=,+-]", "_", told)[:_LONGEST_NAME]
    return name if name == told else f"{name}-{zlib.crc32(told.encode()):08x}"


def _is_done(spec: RunSpec, out: Path) -> bool:
    """Whether a folder holds this very run, and it is finished."""
    if not (out / JOURNAL).exists():
        return False
    with RunReader(out) as reader:
        record, num_steps = reader.run(), len(reader.steps())
    is_whole = num_steps >= spec.settings.rollout.num_rollout or record.cause is not None
    is_same = stored_identity(record.settings) == spec.settings.identity()
    return record.status is RunStatus.FINISHED and is_whole and is_same


def _problem(spec: RunSpec, out: Path, *, overwrite: bool) -> str | None:
    if spec.settings.trains:
        return app.directory_problem(spec, out, overwrite=overwrite)
    return app.run_problem(spec, out, overwrite=overwrite, step=None)


def _made(planned: _Planned, arguments: argparse.Namespace) -> int:
    """Make one run in a process of its own, and return how that ended; what it prints goes to standard error."""
    overrides = [*arguments.overrides, *(f"{key}={value}" for key, value in planned.values.items())]
    options = [word for override in overrides for word in ("--set", override)]
    flags = [f"--{name}" for name in ("overwrite", "quiet", "verbose") if getattr(arguments, name)]
    command = [sys.executable, "-m", "rollfeed", "train" if planned.spec.settings.trains else "run"]
    process = subprocess.Popen(
        [*command, *map(str, arguments.files), *options, "--out", str(planned.out), *flags],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
    )
    was_told = False

    def tell(number: int, _frame: FrameType | None) -> None:
        nonlocal was_told
        was_told = True
        process.send_signal(number)

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return exit_codes.INTERRUPTED if was_told else code


def _row(planned: _Planned) -> _Row:
    about = (planned.values, str(planned.out))
    if not (planned.out / JOURNAL).exists():
        return _Row(*about, "not begun", 0, None, None, None)
    with RunReader(planned.out) as reader:
        steps, evaluations = reader.steps(), reader.evaluations()
        reward = steps[-1].metrics.get("rollout/reward_mean") if steps else None
        accuracy = evaluations[-1]["accuracy"] if evaluations else None
        return _Row(*about, reader.status(), len(steps), reward, accuracy, reader.run().cause)


def _lines(rows: Sequence[_Row], out: Path) -> Iterator[str]:
    cells = [(*rows[0].settings, "steps", "reward", "accuracy", "status")]
    for row in rows:
        accuracy = "-" if row.accuracy is None else f"{row.accuracy:.1%}"
        reward = "-" if row.reward is None else f"{row.reward:.4f}"
        cells.append((*row.settings.values(), str(row.steps), reward, accuracy, row.status))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    for row in rows:
        if row.status != RunStatus.FINISHED:
            yield f"{row.directory}: {row.status}{f': {row.cause}' if row.cause else ''}"
    yield f"{counted(len(rows), 'run')} in {out}"
