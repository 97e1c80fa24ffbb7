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
from importlib import import_module

from rollfeed import __version__
from rollfeed.cli import exit_codes
from rollfeed.cli.output import close_output, open_output
from rollfeed.errors import COMPUTING_ERRORS, ConfigError, RollfeedError, in_one_line

_COMMANDS = {
    "init": "write settings, a reward and data to start from, which run at once",
    "run": "generate rollouts as a settings file says",
    "train": "generate rollouts and train on them",
    "sweep": "make runs that differ in a few settings, one after another, and compare them",
    "eval": "measure a model on held-out prompts",
    "check": "check a settings file, its data, plug-ins and model without starting anything",
    "convert-slime": "make a settings file of a script for slime or miles",
    "show": "print the steps, groups, rewards and drop reasons of a run",
    "view": "serve a page on runs, in a browser on this machine",
    "report": "write that page as one file",
    "lint": "check that what is trained was sampled: masks, turns, logprobs, versions",
    "verify": "recount a run: bytes, ledger, versions, masks, numbers; go back to a step that is whole",
    "atif": "write samples as ATIF trajectories, or read them",
    "env": "list environments, show problems of one, check them, measure levels, or plot",
    "replay": "reward, filter and cut the answers of a run again, with other settings",
    "score": "grade the responses of a file, a run or an evaluation",
    "graders": "list the graders, with an example of each",
    "serve": "serve a model, a router, a gateway for agents, a fake of a model, graders, or weights, over HTTP",
    "completion": "print a script by which a shell completes commands",
    "bench": "measure speed as ratios to a reference, in one run",
}
"""What the list of commands says of each; a command is a module of this package."""


_WITH_LOG = ("run", "train", "eval")
"""Commands that leave what was logged in a file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    with exit_codes.signals_given_back():
        return _code_of(arguments)


def _code_of(arguments: Sequence[str] | None) -> int:
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
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = build_parser(next(iter(words), ""))
    if words[:1] == ["convert-slime"]:
        from rollfeed.cli.convert_slime import with_flags_as_source  # imported with its parser by now

        words = with_flags_as_source(words)
    parsed = parser.parse_args(words)
    log = logging.getLogger("rollfeed")
    log.handlers = [_StderrHandler(logging.WARNING if getattr(parsed, "quiet", False) else logging.INFO)]
    log.setLevel(logging.INFO)
    if words[0] in _WITH_LOG:
        from rollfeed.logs import EarlyRecords

        log.addHandler(EarlyRecords())
    code: int = parsed.run(parsed)
    return code


class _StderrHandler(logging.Handler):
    """Prints to what standard error is at that moment: a live display puts itself in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def build_parser(command: str) -> argparse.ArgumentParser:
    """Return a parser that knows the names of all commands, and the arguments of one; others are not imported."""
    parser = argparse.ArgumentParser(
        prog="rollfeed",
        description="Rollouts for reinforcement learning of language models, and their way to the trainer.",
        epilog="example: rollfeed init dataset && rollfeed run dataset/run.toml",
    )
    parser.add_argument("--version", action="version", version=f"rollfeed {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, told in _COMMANDS.items():
        if name == command:
            # Imported here, as Ctrl-C is told in one line during the seconds that it takes, too.
            import_module(f"rollfeed.cli.{name.replace('-', '_')}").register(commands)
        else:
            commands.add_parser(name, help=told)
    return parser


def entry_point() -> None:
    """Run the command line and leave the process, also when a thread still computes or a user's function hangs."""
    open_output()
    code = _code_of(None)
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
