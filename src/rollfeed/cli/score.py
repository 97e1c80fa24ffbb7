"""``rollfeed score``: grade the responses of a file."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import (
    Parsers,
    add_command,
    add_flags,
    add_path,
    add_reward_arguments,
    path_argument,
    scoring_of,
)
from rollfeed.cli.progress import StatusLine
from rollfeed.types import Outcome

if TYPE_CHECKING:
    from rollfeed.rewards.scoring import GraderCounts, ScoreCounts

_EPILOG = """each line of FILE is an object such as
  {"id": "a", "rm_type": "math", "response": "It is \\\\boxed{4}.", "label": "4"}
with metadata, reward_key and prompt where the grader needs them; a line of OUT then is
  {"id": "a", "reward": 1.0, "outcome": "ok", "extracted": "4", "seconds": 0.0001, "detail": ""}
Metadata may name a function of [reward.functions] under reward_fn; [plugins] reward scores the rest, then rm_type.
The reward of a row that could not be graded is null, and its outcome error or timeout; the exit code is 0 all the same,
and 1 with --strict.

example: rollfeed score responses.jsonl --out rewards.jsonl
"""


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "score",
        run,
        description="Grade the responses of a JSONL file, in order, into another, which appears when it is complete.",
        epilog=_EPILOG,
    )
    parser.add_argument("file", metavar="FILE", type=path_argument, help="responses, one JSON object a line")
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
    from rollfeed.app import score_file

    scoring = scoring_of(arguments)
    with StatusLine(_progress, quiet=arguments.quiet) as progress:
        grading = score_file(
            arguments.file,
            arguments.out,
            settings=scoring.settings,
            functions=scoring.functions,
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
