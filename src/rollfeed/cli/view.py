"""``rollfeed view``: a page on runs, in a browser on this machine."""

from __future__ import annotations

import argparse
import asyncio

from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_command, path_argument
from rollfeed.errors import ConfigError

_DEFAULT_PORT = 7150


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "view",
        run,
        description="Serve a page on runs, trainings and evaluations: curves, steps, groups, samples with their tokens "
        "coloured by mask, log-probability, policy version or advantage, and two runs side by side. A run that goes on "
        "is followed. Only this machine can open it, and nothing is sent or fetched.",
        epilog="example: rollfeed view runs/demo, and then open http://127.0.0.1:7150/",
    )
    add_runs(parser)
    parser.add_argument(
        "--port", metavar="P", type=int, default=_DEFAULT_PORT, help=f"0 takes a free one (default {_DEFAULT_PORT})"
    )


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the folders that a page is on."""
    told = "a run directory, what `rollfeed eval` wrote, or a folder of such"
    parser.add_argument("folders", metavar="DIR", nargs="+", type=path_argument, help=told)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError if there is no run, or the port is taken."""
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port}: ports must be within 0 and 65535")
    return asyncio.run(_serve(arguments))


async def _serve(arguments: argparse.Namespace) -> int:
    # Fetched here, as it takes a while that other commands need not wait.
    from rollfeed.base.serving import serve_application
    from rollfeed.viewer import LOOPBACK, ViewServer

    told = exit_codes.ToldToEnd()
    application = ViewServer(arguments.folders).application()
    async with serve_application(application, host=LOOPBACK, port=arguments.port) as address:
        print(f"open {address}/ (Ctrl-C ends it)", flush=True)
        await told.event.wait()
    return told.exit_code
