"""``rollfeed serve weights``: a receiver of new weights, beside a server that loads folders."""

from __future__ import annotations

import argparse
import asyncio
import logging

from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_address, add_command, add_path, add_server_key, server_key
from rollfeed.errors import ConfigError

logger = logging.getLogger("rollfeed.serve")

_DEFAULT_PORT = 30200


def register(actions: Parsers) -> None:
    """Add the action to those of ``serve``."""
    parser = add_command(
        actions,
        "weights",
        run,
        help="receive deltas of weights, and make the folders that a server on this host loads",
        description="Receive new weights as what has changed in them (engine.*.weights_transport = 'delta'), and keep "
        "the newest two versions as checkpoint folders, which the servers of this host are told to load.",
        epilog="example: rollfeed serve weights --folder /dev/shm/weights --port 30200",
    )
    add_path(parser, "--folder", "DIR", "where the versions are, two and a third in the making", required=True)
    add_address(parser, _DEFAULT_PORT, "0 takes a free one")
    add_server_key(parser, may_do_without=False)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError if an option is wrong, or the port or the folder is taken."""
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port}: ports must be within 0 and 65535")
    return asyncio.run(_serve(arguments, server_key(arguments).value))


async def _serve(arguments: argparse.Namespace, key: str | None) -> int:
    # Fetched here, as it takes a while that other commands need not wait.
    from aiohttp import web

    from rollfeed.base.serving import serve_application
    from rollfeed.weights.transports.delta import CheckpointStore, DeltaReceiver

    told = exit_codes.ToldToEnd()
    store = await asyncio.to_thread(CheckpointStore, arguments.folder)
    try:
        application = web.Application()
        application.add_routes(DeltaReceiver(store).routes())
        async with serve_application(application, host=arguments.host, port=arguments.port, key=key) as address:
            logger.info("receiving weights at %s into %s", address, arguments.folder)
            for held in store.held:
                logger.info("version %d is there", held.policy_version)
            await told.event.wait()
    finally:
        store.close()
    return told.exit_code
