"""``rollfeed lint``: whether what a run trains on was sampled."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_command, add_flags, add_path, path_argument
from rollfeed.cli.progress import StatusLine
from rollfeed.types.text import counted

if TYPE_CHECKING:
    from rollfeed.lint import Finding, Report

_SHOWN = 20
_EPILOG = """RUN is a run directory, the folder of a gateway, slime's saved rollouts (.pt),
or JSON lines of prime-rl or verl.
The exit code is 0 where nothing was found, 1 with findings, 2 where the samples cannot be read.

examples:
  rollfeed lint runs/demo
  rollfeed lint rollouts/ --tokenizer models/qwen --json
"""


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "lint",
        run,
        description="Derive masks and turns again from the chat template and the tokens, and tell where the samples of "
        "a run differ.",
        epilog=_EPILOG,
    )
    parser.add_argument("path", type=path_argument, metavar="RUN", help="a run directory, or files of samples")
    add_path(parser, "--tokenizer", "DIR", "the policy's tokenizer and chat template (default: the run's)")
    parser.add_argument(
        "--model", metavar="NAME", help="compute logprobs with these weights (default: the run's, for its version 0)"
    )
    add_flags(parser, quiet=True, json="samples, findings and what was not checked as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Check the samples and say what is wrong with them. Raises ConfigError if they cannot be read."""
    # Fetched here, as it takes a while that other commands need not wait.
    from rollfeed.app.lint import lint

    with StatusLine(_progress, quiet=arguments.quiet) as progress:
        report = lint(arguments.path, tokenizer=arguments.tokenizer, model=arguments.model, on_progress=progress)
    print(json.dumps(report.to_dict()) if arguments.json else "\n".join(_lines(report)))
    return exit_codes.FAILED if report.by_kind else exit_codes.DONE


def _lines(report: Report) -> Iterator[str]:
    from rollfeed.lint.findings import ADVICE

    for finding in report.findings[:_SHOWN]:
        yield from _told(finding)
    total = report.by_kind.total()
    if total > _SHOWN:
        yield f"... and {total - _SHOWN:,} more"
    for kind, count in report.by_kind.most_common():
        yield f"{count:6,} {kind}: {ADVICE[kind]}"
    for what, count in report.unchecked.items():
        yield f"not checked in {counted(count, 'sample')}: {what}"
    yield f"{counted(report.num_samples, 'sample')}, {counted(report.num_tokens, 'token')}: {counted(total, 'finding')}"


def _told(finding: Finding) -> Iterator[str]:
    place = finding.place
    named = [f"{name} {value}" for name, value in zip(place._fields[1:], place[1:], strict=True) if value is not None]
    yield f"{finding.kind}: {', '.join([place.source, *named])}, tokens {finding.start} to {finding.end}"
    yield f"    {finding.detail}"
    yield f"    {finding.text!r}"


def _progress(report: Report) -> str:
    return f"{counted(report.num_samples, 'sample')}, {counted(report.by_kind.total(), 'finding')}"
