"""``rollfeed serve fake-sglang``: fake servers and a fake router, for tests and measurements of clients."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_address, add_command, add_flags, add_numbers, add_path
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


def register(actions: Parsers) -> None:
    """Add the action to those of ``serve``."""
    parser = add_command(
        actions,
        "fake-sglang",
        run,
        help="serve no model: fake SGLang servers and a fake router, with faults",
        description="Serve fake SGLang servers: scripted, without latency, or on a model of time; with faults.",
        epilog="example: rollfeed serve fake-sglang --mode time-model --workers 4 --router new"
        ' --fault \'{"kind": "status", "status": 429, "probability": 0.1}\'',
    )
    parser.add_argument(
        "--mode", choices=["scripted", "zero", "time-model"], default="zero", help="how replies are made (default zero)"
    )
    add_address(parser, _DEFAULT_PORT, "first port; 0 takes free ones")
    add_numbers(
        parser,
        {
            "--workers": (1, "servers, on ports P, P+1, ... (default 1; 0 for a router alone)"),
            "--speed": (1.0, "how fast the time model's clock runs"),
            "--context-length": (131_072, "tokens (default 131072)"),
        },
    )
    parser.add_argument(
        "--vocab-size", metavar="N", type=int, help="ids are below N, for a model with few tokens (tiny: 40)"
    )
    parser.add_argument("--router", choices=["old", "new"], help="a router on the port after theirs")
    repeated: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--worker-url", metavar="URL", **repeated, help="a further server of the router; repeatable")
    parser.add_argument("--policy", default="least_loaded", help="of the router: least_loaded (default) or round_robin")
    parser.add_argument(
        "--fault", metavar="JSON", **repeated, help="what goes wrong, as POST /fault takes it; repeatable"
    )
    add_path(parser, "--script", "FILE", "JSON list of replies, as POST /script takes it")
    parser.add_argument("--api-key", metavar="K", help="what requests but for health must carry (default: nothing)")
    add_flags(parser, metrics="serve /metrics")
    group = parser.add_argument_group("time model")
    for name, kind, description in _TIME_MODEL:
        group.add_argument(name, metavar="N", type=kind, help=description)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError if an option is wrong, or a port is taken."""
    return asyncio.run(_serve(_settings(arguments)))


def _settings(arguments: argparse.Namespace) -> FakeSettings:
    # Fetched here, as it takes a while that other commands need not wait.
    from rollfeed.testing.fake_sglang import fake_settings

    names = [name.removeprefix("--").replace("-", "_") for name, _, _ in _TIME_MODEL]
    time_model = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    same = ("mode", "host", "port", "router", "policy", "speed", "context_length", "vocab_size", "api_key", "metrics")
    return fake_settings(
        **{name: getattr(arguments, name) for name in same},
        num_workers=arguments.workers,
        worker_urls=arguments.worker_url,
        faults=[_json(text.encode(), "--fault") for text in arguments.fault],
        script=_script(arguments.script),
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
