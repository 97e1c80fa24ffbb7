"""``rollfeed serve reward``: the reward hub over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import logging

from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import (
    Parsers,
    Scoring,
    add_address,
    add_command,
    add_numbers,
    add_reward_arguments,
    add_server_key,
    scoring_of,
    server_key,
)
from rollfeed.errors import ConfigError

_DEFAULT_PORT = 11111

logger = logging.getLogger("rollfeed.serve")


def register(actions: Parsers) -> None:
    """Add the action to those of ``serve``."""
    parser = add_command(
        actions,
        "reward",
        run,
        help="serve the graders: responses in, rewards out",
        description="Serve the graders at POST / and POST /get_reward, one response or many, with /health and "
        "/metrics; docs/rewards.md has the forms.",
        epilog="example: rollfeed serve reward --rm-type math, and then: curl 127.0.0.1:11111 --json "
        '\'{"response": "It is \\\\boxed{4}.", "label": "4"}\'',
    )
    add_address(parser, _DEFAULT_PORT, "0 takes a free one")
    add_numbers(parser, {"--max-in-progress": (1024, "responses that are graded or wait for it; more get status 429")})
    parser.add_argument(
        "--allow",
        metavar="NAME",
        action="append",
        default=[],
        help="a grader that requests may name, beside that of --rm-type; may be given several times",
    )
    add_server_key(parser)
    add_reward_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError if an option is wrong, or the port is taken."""
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port}: ports must be within 0 and 65535")
    if arguments.max_in_progress < 1:
        raise ConfigError(f"--max-in-progress {arguments.max_in_progress}: must be at least 1")
    key = server_key(arguments).value
    return asyncio.run(_serve(arguments, scoring_of(arguments), key))


async def _serve(arguments: argparse.Namespace, scoring: Scoring, key: str | None) -> int:
    # Fetched here, as it takes a while that other commands need not wait.
    from rollfeed.app.rewards import open_reward_hub
    from rollfeed.base.serving import serve_application
    from rollfeed.rewards.over_http.server import RewardServer

    told = exit_codes.ToldToEnd()
    async with open_reward_hub(
        scoring.settings,
        functions=scoring.functions,
        label_names=scoring.label_names,
        folders=scoring.folders,
        more_rm_types=arguments.allow,
    ) as hub:
        rm_types = [*filter(None, [scoring.settings.rm_type]), *arguments.allow]
        if not rm_types and not hub.has_function and not scoring.settings.functions:
            raise ConfigError("--rm-type: name the grader of this server, or with --allow those that requests may name")
        server = RewardServer(hub, rm_types=rm_types, max_in_progress=arguments.max_in_progress)
        serving = serve_application(server.application(), host=arguments.host, port=arguments.port, key=key)
        async with serving as address:
            logger.info("serving rewards at %s", address)
            await told.event.wait()
    return told.exit_code
