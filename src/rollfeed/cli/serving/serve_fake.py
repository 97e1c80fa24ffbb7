"""``rollfeed serve fake-sglang``: fake servers and a fake router, for tests and measurements of clients."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import path_argument
from rollfeed.errors import ConfigError

if TYPE_CHECKING:
    from rollfeed.testing.fake_sglang import FakeSettings

_DEFAULT_PORT = 30000
_TIME_MODEL = (
    ("--num-slots", int, "responses decoded at once by a server (default 64)"),
    ("--step-ms", float, "milliseconds of a decoding step of no requests (default 8)"),
    ("--step-ms-per-request", float, "what each request adds to a step (default 0.05)"),
    ("--prefill-us-per-token", float, "microseconds to compute a prompt token that is not cached (default 20)"),
    ("--kv-budget-tokens", int, "tokens held at once; requests that outgrow it are put back (default: no limit)"),
    ("--median-length", float, "median tokens of a response (default 2000)"),
    ("--sigma-between", float, "spread of the logarithm of lengths between prompts (default 0.6)"),
    ("--sigma-within", float, "and between samples of a prompt (default 0.6)"),
    ("--max-length", int, "longest response (default 16384)"),
    ("--seed", int, "seed of the lengths (default 0)"),
)
"""Options of the time model; those not given keep its defaults."""


def register(actions: Any) -> None:
    """Add the action to those of ``serve``."""
    parser = actions.add_parser(
        "fake-sglang",
        help="serve no model: fake SGLang servers and a fake router, with faults",
        description="Serve fake SGLang servers: scripted, without latency, or on a model of time; with faults.",
        epilog="example: rollfeed serve fake-sglang --mode time-model --workers 4 --router new"
        ' --fault \'{"kind": "status", "status": 429, "probability": 0.1}\'',
    )
    parser.add_argument(
        "--mode", choices=["scripted", "zero", "time-model"], default="zero", help="how replies are made (default zero)"
    )
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument(
        "--port", metavar="P", type=int, default=_DEFAULT_PORT, help="first port; 0 takes free ones (default 30000)"
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=int,
        default=1,
        help="servers, on ports P, P+1, ... (default 1; 0 for a router alone)",
    )
    parser.add_argument("--router", choices=["old", "new"], help="a router on the port after theirs")
    parser.add_argument(
        "--worker-url", metavar="URL", action="append", default=[], help="a further server of the router; repeatable"
    )
    parser.add_argument("--policy", default="least_loaded", help="of the router: least_loaded (default) or round_robin")
    parser.add_argument(
        "--fault",
        metavar="JSON",
        action="append",
        default=[],
        help="what goes wrong, as POST /fault takes it; repeatable",
    )
    parser.add_argument(
        "--script", metavar="FILE", type=path_argument, help="JSON list of replies, as POST /script takes it"
    )
    parser.add_argument("--speed", metavar="X", type=float, default=1.0, help="how fast the time model's clock runs")
    parser.add_argument("--context-length", metavar="N", type=int, default=131_072, help="tokens (default 131072)")
    parser.add_argument("--api-key", metavar="K", help="what requests but for health must carry (default: nothing)")
    parser.add_argument("--metrics", action="store_true", help="serve /metrics")
    group = parser.add_argument_group("time model")
    for name, kind, description in _TIME_MODEL:
        group.add_argument(name, metavar="N", type=kind, help=description)
    parser.set_defaults(run=run_fake)


def run_fake(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: If an option is wrong, or a port is taken.
    """
    return asyncio.run(_serve(_settings(arguments)))


def _settings(arguments: argparse.Namespace) -> FakeSettings:
    # Fetched here, as it takes a while that other commands need not wait.
    from rollfeed.testing.fake_sglang import fake_settings

    names = [name.removeprefix("--").replace("-", "_") for name, _, _ in _TIME_MODEL]
    time_model = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return fake_settings(
        mode=arguments.mode,
        host=arguments.host,
        port=arguments.port,
        num_workers=arguments.workers,
        router=arguments.router,
        worker_urls=arguments.worker_url,
        policy=arguments.policy,
        faults=[_json(text.encode(), "--fault") for text in arguments.fault],
        script=_script(arguments.script),
        speed=arguments.speed,
        context_length=arguments.context_length,
        api_key=arguments.api_key,
        metrics=arguments.metrics,
        time_model=time_model,
    )


def _script(path: Path | None) -> Any:
    if path is None:
        return []
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--script {path}: {error.strerror}") from error
    return _json(content, f"--script {path}")


def _json(text: bytes, option: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: not JSON: {error}") from None


async def _serve(settings: FakeSettings) -> int:
    from rollfeed.testing.fake_sglang import run_fakes

    told = exit_codes.ToldToEnd()
    await run_fakes(settings, _tell, told.event)
    return told.exit_code


def _tell(addresses: Sequence[str], router_address: str | None) -> None:
    for address in addresses:
        print(f"fake SGLang at {address}", flush=True)
    if router_address is not None:
        print(f"fake router at {router_address}", flush=True)
