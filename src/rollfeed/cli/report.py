"""``rollfeed report``: the page of ``rollfeed view`` as one file."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollfeed.cli.arguments import Parsers, add_command, add_path
from rollfeed.cli.view import add_runs
from rollfeed.errors import ConfigError, RunFailedError


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "report",
        run,
        description="Write the page of `rollfeed view` as one HTML file of at most 10 MB, with all curves and of each "
        "step some of the worst, the best and the other samples; it needs no server and no network.",
        epilog="example: rollfeed report runs/demo --out demo.html",
    )
    add_runs(parser)
    add_path(parser, "--out", "FILE", "the file, which is replaced", required=True)


def run(arguments: argparse.Namespace) -> int:
    """Write the file and return 0.

    Raises:
        ConfigError: If there is no run, or no folder for the file.
        RollfeedError: If one cannot be read, or the file cannot be written.
    """
    from rollfeed.viewer import find_runs, write_report

    out: Path = arguments.out
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out {out}: {'is' if out.is_dir() else f'{out.parent} is not'} a directory; name a file")
    try:
        num_shown, num_all = write_report(find_runs(arguments.folders), out)
    except OSError as error:
        raise RunFailedError(f"{out}: cannot be written: {error.strerror}; choose another --out") from error
    size = out.stat().st_size / 1e6
    left = f"; {num_all - num_shown:,} samples are left out" if num_shown < num_all else ""
    print(f"{out}: {size:.1f} MB, {num_shown:,} samples of {num_all:,}{left}")
    return 0
