"""The ``rollfeed`` command.

Exit codes: 0 done, 1 the run failed, 2 wrong usage or input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence

from rollfeed.cli import exit_codes
from rollfeed.cli.output import close_output, open_output
from rollfeed.errors import COMPUTING_ERRORS, ConfigError, RollfeedError, in_one_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        code = _run(arguments)
    except ConfigError as error:
        _complain(error)
        code = exit_codes.USAGE
    except RollfeedError as error:
        _complain(error)
        code = exit_codes.FAILED
    except COMPUTING_ERRORS as error:
        print(f"rollfeed: {in_one_line(error)} ({_place(error)})", file=sys.stderr)
        code = exit_codes.FAILED
    except KeyboardInterrupt as stop:
        print(f"rollfeed: {stop}" if str(stop) else "rollfeed: interrupted", file=sys.stderr)
        code = exit_codes.INTERRUPTED
    return code


def _run(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    from rollfeed.cli.convert_slime import with_flags_as_source  # imported with the parser by now

    parsed = parser.parse_args(with_flags_as_source(sys.argv[1:] if arguments is None else list(arguments)))
    log = logging.getLogger("rollfeed")
    log.handlers = [_StderrHandler()]
    log.setLevel(logging.WARNING if getattr(parsed, "quiet", False) else logging.INFO)
    code: int = parsed.run(parsed)
    return code


class _StderrHandler(logging.Handler):
    """Prints to what standard error is at that moment: a live display puts itself in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    # Imported here, as Ctrl-C is told in one line during the seconds that it takes, too.
    from rollfeed.cli import atif, bench, check, convert_slime, env, lint, run, score, serve, show, train
    from rollfeed.cli import eval as evaluation

    parser = argparse.ArgumentParser(
        prog="rollfeed",
        description="Rollouts for reinforcement learning of language models, and their way to the trainer.",
        epilog="example: rollfeed run examples/demo/demo.toml",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (run, train, evaluation, check, convert_slime, show, lint, atif, env, score, serve, bench):
        command.register(commands)
    return parser


def entry_point() -> None:
    """Run the command line and leave the process, also when a thread still computes or a user's function hangs."""
    open_output()
    code = main()
    # Ctrl-C once more, while the interpreter ends, would add a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if problem := close_output():
        print(f"rollfeed: standard output: {problem}; not all of it was written", file=sys.stderr, flush=True)
        code = code or exit_codes.FAILED
    # Python ends by the signal, and not with our code, when Ctrl-C has come while it was running generated code.
    if threading.active_count() > 1 or code == exit_codes.INTERRUPTED:
        os._exit(code)
    sys.exit(code)


def _complain(error: RollfeedError) -> None:
    for line in str(error).splitlines():
        print(f"rollfeed: {line}", file=sys.stderr)


def _place(error: BaseException) -> str:
    """Return where an error was raised, for those who can mend it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"
