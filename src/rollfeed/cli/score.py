"""``rollfeed score``: grade the responses of a file."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import (
    Parsers,
    Scoring,
    add_command,
    add_flags,
    add_path,
    add_reward_arguments,
    path_argument,
    scoring_of,
)
from rollfeed.cli.progress import StatusLine
from rollfeed.errors import ConfigError, suggestion
from rollfeed.types import Outcome

if TYPE_CHECKING:
    from rollfeed.rewards.scoring import GraderCounts, ScoreCounts

_EPILOG = """FILE is JSON lines, or .csv, .tsv, .json or .parquet; "-" is JSON lines from standard input; a run
directory or the folder of an evaluation is scored again, a run by its own settings unless --settings or --rm-type say
otherwise.
A row is an object such as
  {"id": "a", "rm_type": "math", "response": "It is \\\\boxed{4}.", "label": "4"}
with metadata, reward_key and prompt where the grader needs them; a line of OUT then is
  {"id": "a", "reward": 1.0, "outcome": "ok", "extracted": "4", "seconds": 0.0001, "detail": ""}
Metadata may name a function of [reward.functions] under reward_fn; [plugins] reward scores the rest, then rm_type.
The reward of a row that could not be graded is null, and its outcome error or timeout; the exit code is 0 all the same,
and 1 with --strict.

example: rollfeed score responses.jsonl --out rewards.jsonl
  rollfeed score answers.csv --column response=completion --column label=answer --rm-type math --out rewards.jsonl
  rollfeed score runs/words --rm-type f1 --out rewards.jsonl
"""
_NAMES = ("id", "response", "label", "rm_type", "metadata", "reward_key", "reward_fn", "prompt")


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "score",
        run,
        description="Grade responses, in order, into a JSONL file, which appears when it is complete.",
        epilog=_EPILOG,
    )
    parser.add_argument("file", metavar="FILE", type=path_argument, help="responses: a file, a run or an evaluation")
    column = "the column of FILE that is called otherwise there; may be given several times"
    parser.add_argument("--column", metavar="NAME=COLUMN", action="append", default=[], help=column)
    add_path(parser, "--out", "OUT", "where the rewards go (JSONL)", required=True)
    add_reward_arguments(parser)
    strict = "exit with 1 when a row could not be graded"
    add_flags(parser, strict=strict, quiet=True, json="the counts as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Grade, and say how many of each outcome there were, how good the rest is, and the same for each grader.

    Raises:
        ConfigError: If an option or a file is wrong; OUT is not touched then.
    """
    # Fetched here, as it takes a while that other commands need not wait.
    from rollfeed.app import answer_reader, score_file

    columns = dict(map(_column, arguments.column))
    scoring = _scoring(arguments)
    with StatusLine(_progress, quiet=arguments.quiet) as progress, TemporaryDirectory() as folder:
        file = _saved_input(Path(folder)) if str(arguments.file) == "-" else arguments.file
        grading = score_file(
            file,
            arguments.out,
            read=answer_reader(file, columns),
            settings=scoring.settings,
            functions=scoring.functions,
            label_names=scoring.label_names,
            folders=scoring.folders,
            progress=progress,
        )
        counts = asyncio.run(exit_codes.until_signal(grading))
    if arguments.json:
        print(json.dumps(_record(counts, arguments.out)))
    else:
        print("\n".join(_lines(counts, arguments.out)))
    is_refused = arguments.strict and counts.by_outcome[Outcome.OK] < counts.graded
    return exit_codes.FAILED if is_refused else exit_codes.DONE


def _column(given: str) -> tuple[str, str]:
    name, equals, column = given.partition("=")
    if not equals or name not in _NAMES or not column:
        known = suggestion(name, _NAMES)
        raise ConfigError(f"--column {given}: write it as name=column, for example response=completion; {known}")
    return name, column


def _scoring(arguments: argparse.Namespace) -> Scoring:
    """Return what the options say; of a run, what its own settings say unless options do."""
    file: Path = arguments.file
    if arguments.settings is not None or arguments.rm_type is not None or not (file / "journal.sqlite").is_file():
        return scoring_of(arguments)
    from rollfeed.app import label_names, stored_spec

    spec = stored_spec(file)
    settings, names = spec.settings, frozenset(label_names(spec.settings))
    return scoring_of(arguments, Scoring(settings.reward, settings.plugins, spec.folders, names))


def _saved_input(folder: Path) -> Path:
    """Return a file with what stands in standard input, as rows are read twice."""
    path = folder / "standard-input.jsonl"
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return path


def _record(counts: ScoreCounts, out: Path) -> dict[str, Any]:
    by_grader = {name: _numbers(each) for name, each in sorted(counts.by_grader.items())}
    about = {"out": str(out), "rows": counts.graded, **_numbers(counts.all), "seconds": counts.seconds}
    return {**about, "by_grader": by_grader}


def _numbers(counts: GraderCounts) -> dict[str, Any]:
    outcomes = {outcome.value: counts.by_outcome[outcome] for outcome in Outcome}
    return {**outcomes, "reward_mean": counts.reward_mean, "correct_ratio": counts.correct_ratio}


def _lines(counts: ScoreCounts, out: Path) -> Iterator[str]:
    yield f"{counts.graded} rows in {out}: {_outcomes(counts.all)}, in {counts.seconds:.1f} s"
    if counts.all.reward_mean is not None:
        yield _quality(counts.all)
    width = max((len(name) for name in counts.by_grader), default=0)
    for name, each in sorted(counts.by_grader.items()):
        told = f"{_outcomes(each)}" + ("" if each.reward_mean is None else f"; {_quality(each)}")
        yield f"  {name or 'no grader':{max(width, len('no grader'))}}  {told}"


def _outcomes(counts: GraderCounts) -> str:
    by_outcome = counts.by_outcome
    return (
        f"{by_outcome[Outcome.OK]} graded, {by_outcome[Outcome.ERROR]} errors, {by_outcome[Outcome.TIMEOUT]} timeouts"
    )


def _quality(counts: GraderCounts) -> str:
    return f"mean reward {counts.reward_mean:.4f}, {counts.correct_ratio:.1%} correct"


def _progress(counts: ScoreCounts) -> str:
    failed = counts.graded - counts.by_outcome[Outcome.OK]
    speed = counts.graded / max(counts.seconds, 1e-9)
    return f"{counts.graded} of {counts.total} rows, {failed} failed, {speed:.0f} rows/s"
