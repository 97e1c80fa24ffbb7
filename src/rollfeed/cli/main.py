"""The ``rollfeed`` command.

Exit codes: 0 done, 1 the run failed, 2 wrong usage or input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Sequence

from rollfeed.cli import bench, check, env, exit_codes, run, show
from rollfeed.cli.evaluating import eval as evaluation
from rollfeed.cli.grading import score
from rollfeed.cli.output import close_output, open_output
from rollfeed.cli.serving import serve
from rollfeed.cli.training import train
from rollfeed.errors import ConfigError, RollfeedError

_COMMANDS = (run, train, evaluation, check, show, env, score, serve, bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parsed = build_parser().parse_args(arguments)
    log = logging.getLogger("rollfeed")
    log.handlers = [_StderrHandler()]
    log.setLevel(logging.WARNING if getattr(parsed, "quiet", False) else logging.INFO)
    try:
        code: int = parsed.run(parsed)
    except ConfigError as error:
        _complain(error)
        code = exit_codes.USAGE
    except RollfeedError as error:
        _complain(error)
        code = exit_codes.FAILED
    except KeyboardInterrupt:
        print("rollfeed: interrupted", file=sys.stderr)
        code = exit_codes.INTERRUPTED
    return code


class _StderrHandler(logging.Handler):
    """Prints to what standard error is at that moment: a live display puts itself in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="rollfeed",
        description="Rollouts for reinforcement learning of language models, and their way to the trainer.",
        epilog="example: rollfeed run examples/demo/demo.toml",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.register(commands)
    return parser


def entry_point() -> None:
    """Run the command line and leave the process, also when a thread still computes or a user's function hangs."""
    open_output()
    code = main()
    if problem := close_output():
        print(f"rollfeed: standard output: {problem}; not all of it was written", file=sys.stderr, flush=True)
        code = code or exit_codes.FAILED
    if threading.active_count() > 1:
        os._exit(code)
    sys.exit(code)


def _complain(error: RollfeedError) -> None:
    for line in str(error).splitlines():
        print(f"rollfeed: {line}", file=sys.stderr)
