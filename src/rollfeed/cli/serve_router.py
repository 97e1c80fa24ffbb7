"""``rollfeed serve router``: one address for many servers."""

from __future__ import annotations

import argparse
import asyncio
import logging
from typing import TYPE_CHECKING

from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_address, add_command, add_numbers, add_path, add_server_key, server_key
from rollfeed.errors import ConfigError

if TYPE_CHECKING:
    from rollfeed.config.api_key import ApiKey
    from rollfeed.router.router_settings import RouterSettings
    from rollfeed.router.span_cache import SpanCache

_DEFAULT_PORT = 30080
_NUMBERS: dict[str, tuple[int | float, str]] = {
    "--max-in-flight": (4096, "requests at one worker; more wait in the router"),
    "--max-waiting": (16_384, "requests that wait in the router; more get status 429"),
    "--wait-seconds": (300.0, "that a request waits for a worker; then it gets status 503"),
    "--request-seconds": (3600.0, "of one request at workers, all tries together"),
    "--max-tries": (3, "of one request, at different workers"),
    "--probe-seconds": (5.0, "between two probes of a worker"),
    "--probe-timeout-seconds": (5.0, "for its answer"),
    "--probes-until-down": (3, "failed probes in a row after which a worker has no more requests"),
    "--control-seconds": (30.0, "for a worker to answer an abort, a pause or the like"),
    "--update-seconds": (600.0, "for a worker to load weights, and for an update in several calls to be finished"),
    "--late-seconds": (
        60.0,
        "for a worker to get weights that others publish to it, before it is told to load them",
    ),
    "--drain-seconds": (10.0, "for aborted requests to end before an update"),
}
"""Options that are fields of the router's settings."""

logger = logging.getLogger("rollfeed.serve")


def register(actions: Parsers) -> None:
    """Add the action to those of ``serve``."""
    parser = add_command(
        actions,
        "router",
        run,
        help="serve one address for many servers: SGLang's, vLLM's and embedded ones",
        description="Pass requests on to servers, each to the one that has most of its prompt computed and least to "
        "do; with aborts, pauses and weights for all of them at once; docs/router.md.",
        epilog="example: rollfeed serve router http://10.0.0.5:30000 http://10.0.0.6:30000, and in a settings file: "
        'engine.sglang.router = "http://127.0.0.1:30080"',
    )
    parser.add_argument("workers", metavar="URL", nargs="*", help="address of a server; more may join at POST /workers")
    add_address(parser, _DEFAULT_PORT, "0 takes a free one")
    parser.add_argument(
        "--policy",
        choices=["prefix", "least_loaded", "round_robin"],
        default="prefix",
        help="how a server is chosen (default prefix: by what it has computed and what it has to do)",
    )
    add_numbers(parser, _NUMBERS)
    parser.add_argument(
        "--span-cache",
        metavar="TOKENS",
        type=int,
        help="keep sampled tokens, so that texts of /generate that have them get the same ones, with --tokenizer",
    )
    parser.add_argument(
        "--span-cache-versions",
        metavar="N",
        type=int,
        help="newer versions after which sampled tokens that nobody uses are forgotten (default: when room is needed)",
    )
    add_path(parser, "--tokenizer", "FOLDER", "of the policy, for --span-cache")
    add_server_key(parser, "--api-key-env", of="servers and clients")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError if an option is wrong, or the port is taken."""
    # Fetched here, as it takes a while that other commands need not wait.
    from rollfeed.base.sglang_wire import RequestError
    from rollfeed.router.fleet_control import checked_worker
    from rollfeed.router.router_settings import RouterSettings, RoutingPolicy

    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port}: ports must be within 0 and 65535")
    fields = {name.removeprefix("--").replace("-", "_") for name in _NUMBERS}
    numbers = {name: getattr(arguments, name) for name in fields}
    settings = RouterSettings(policy=RoutingPolicy(arguments.policy), **numbers)
    try:
        workers = [checked_worker(url) for url in arguments.workers]
    except RequestError as error:
        raise ConfigError(str(error)) from None
    key = server_key(arguments, "--api-key-env")
    return asyncio.run(_serve(arguments, workers, settings, key, _span_cache(arguments)))


def _span_cache(arguments: argparse.Namespace) -> SpanCache | None:
    if (arguments.span_cache is None) is not (arguments.tokenizer is None):
        raise ConfigError("--span-cache and --tokenizer: give both, or neither")
    age = arguments.span_cache_versions
    if arguments.span_cache is None:
        if age is not None:
            raise ConfigError("--span-cache-versions: there is no cache: give --span-cache and --tokenizer, too")
        return None
    if arguments.span_cache < 1:
        raise ConfigError(f"--span-cache {arguments.span_cache}: must be at least 1")
    if age is not None and age < 0:
        raise ConfigError(f"--span-cache-versions {age}: must be at least 0")
    from rollfeed.prompts.tokenizer import load_tokenizer
    from rollfeed.router.span_cache import SpanCache

    return SpanCache(load_tokenizer(arguments.tokenizer), num_tokens=arguments.span_cache, max_version_age=age)


async def _serve(
    arguments: argparse.Namespace, workers: list[str], settings: RouterSettings, key: ApiKey, spans: SpanCache | None
) -> int:
    from rollfeed.router.router_service import serve_router

    told = exit_codes.ToldToEnd()
    serving = serve_router(workers, settings, host=arguments.host, port=arguments.port, api_key=key, spans=spans)
    async with serving as (address, service):
        logger.info("routing to %d workers at %s", len(service.fleet.ready), address)
        for member in service.fleet:
            if member.reason:
                logger.warning("%s: %s: %s", member.address, member.state.value, member.reason)
        await told.event.wait()
    return told.exit_code
