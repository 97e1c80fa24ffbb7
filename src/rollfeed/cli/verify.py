"""``rollfeed verify``: whether a run is as it was written, and adds up."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_command, add_flags, path_argument
from rollfeed.cli.progress import StatusLine
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.types.text import counted

if TYPE_CHECKING:
    from rollfeed.app.verifying import Verification

_SHOWN = 20
_EPILOG = """Files are compared with the digests in the journal; ledger, staleness and metrics are counted again from
the batches, and masks are linted. Nothing is written without --restore.
The exit code is 0 where all is as it was written, 1 with findings, 2 where there is no run.

examples:
  rollfeed verify runs/demo
  rollfeed verify runs/demo --json
  rollfeed verify runs/demo --restore 41     step 41 is the last one; later files go to runs/demo/set-aside
"""


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "verify",
        run,
        description="Recount a run: bytes, the ledger, versions, masks, and numbers against batches.",
        epilog=_EPILOG,
    )
    parser.add_argument("directory", metavar="DIR", type=path_argument, help="the directory that `rollfeed run` wrote")
    parser.add_argument(
        "--restore",
        metavar="STEP",
        help="make this step the last one, or `start`; what comes behind it is set aside in DIR, nothing is deleted",
    )
    add_flags(parser, quiet=True, json="what was found as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Verify, and say what is wrong; or take the run back. Raises ConfigError if there is no run."""
    if arguments.restore is not None:
        return _restore(arguments.directory, arguments.restore, as_json=arguments.json)
    # Fetched here, as it takes a while that other commands need not wait.
    from rollfeed.app.verifying import verify_run

    with StatusLine(_progress, quiet=arguments.quiet) as progress:
        found = verify_run(arguments.directory, on_progress=progress)
    print(json.dumps(found.to_dict()) if arguments.json else "\n".join(_lines(found)))
    return exit_codes.FAILED if found.by_kind else exit_codes.DONE


def _restore(directory: Path, asked: str, *, as_json: bool) -> int:
    from rollfeed.app.verifying import restore_run

    if asked != "start" and not asked.isdecimal():
        raise ConfigError(f"--restore {asked}: give the number of a step, or start")
    try:
        aside = restore_run(directory, None if asked == "start" else int(asked))
    except OSError as error:
        raise RunFailedError(
            f"{directory}: cannot be taken back: {error.strerror}; make room, and try again"
        ) from error
    if as_json:
        print(json.dumps({"directory": str(directory), "restored": asked, "aside": str(aside)}))
    else:
        print(
            f"{directory}: taken back to {'its start' if asked == 'start' else f'step {asked}'}; the rest is in {aside}"
        )
        print(f"it goes on with: rollfeed run --resume {directory} (a training with the same rollfeed train ... --out)")
    return exit_codes.DONE


def _lines(found: Verification) -> Iterator[str]:
    directory = found.directory
    for each in found.found[:_SHOWN]:
        yield f"{each.kind}: {each.place}: {each.detail}"
    total = found.by_kind.total()
    if total > _SHOWN:
        yield f"... and {total - _SHOWN:,} more"
    for told, names in (("not vouched for", found.not_vouched), ("not covered", found.not_covered)):
        if names:
            more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
            yield f"{told}: {', '.join(names[:_SHOWN])}{more}"
    yield from (f"not checked: {each}" for each in found.unchecked)
    read = f"{counted(found.num_steps, 'step')}, {counted(found.num_samples, 'sample')}"
    files = f"{counted(found.num_files, 'file')} ({found.num_bytes:,} bytes) as written"
    yield f"{read}, {files}: {counted(total, 'finding')}"
    if found.by_kind:
        back = "start" if found.last_good is None else found.last_good
        yield f"restore it from a copy, or go back to a whole step: rollfeed verify {directory} --restore {back}"


def _progress(found: Verification) -> str:
    told = (
        counted(found.num_files, "file"),
        counted(found.num_steps, "step"),
        counted(found.by_kind.total(), "finding"),
    )
    return ", ".join(told)
