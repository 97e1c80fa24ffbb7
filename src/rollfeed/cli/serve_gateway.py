"""``rollfeed serve gateway``: agents that speak to an API, recorded as samples."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path

from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_address, add_command, add_numbers, add_path, add_server_key, server_key
from rollfeed.engine import DEFAULT_MODEL
from rollfeed.errors import ConfigError
from rollfeed.protocols import Matching, RewrittenTurns
from rollfeed.types import SamplingParams

logger = logging.getLogger("rollfeed.serve")

_DEFAULT_PORT = 30100
_OPERATOR_KEY = "--operator-key-env"
"""Of those who open and finish sessions; agents have the key of theirs."""
_KINDS = {"sglang": "sglang", "vllm": "openai"}


def register(actions: Parsers) -> None:
    """Add the action to those of ``serve``."""
    parser = add_command(
        actions,
        "gateway",
        run,
        help="serve the policy to agents that speak OpenAI's or Anthropic's API, and record them as samples",
        description="Serve the policy in the APIs of OpenAI and Anthropic. POST /sessions opens a session for an "
        "agent; POST /sessions/ID/finish returns its samples; docs/gateway.md has the rest.",
        epilog="example: rollfeed serve gateway --model /models/qwen --engine http://10.0.0.5:30000 --folder sessions",
    )
    parser.add_argument(
        "--model",
        metavar="M",
        default=DEFAULT_MODEL,
        help=f"the policy's folder or hub name; beside --engine only its tokenizer is needed (default {DEFAULT_MODEL})",
    )
    parser.add_argument("--engine", metavar="URL", help="server that samples (default: the embedded engine)")
    parser.add_argument("--engine-kind", choices=[*_KINDS], default="sglang", help="what that is (default sglang)")
    parser.add_argument("--engine-key-env", metavar="VAR", help="variable with the key of that server")
    add_server_key(parser, _OPERATOR_KEY, of="those who open and finish sessions", may_do_without=False)
    parser.add_argument(
        "--served-name",
        metavar="NAME",
        action="append",
        default=[],
        help="name by which agents may ask for the policy; may be given several times (default: that of --model)",
    )
    parser.add_argument(
        "--matching", choices=["lenient", "strict"], default="lenient", help="when a turn in a history is one sampled"
    )
    parser.add_argument(
        "--rewritten-turns",
        choices=["fork", "append", "refuse"],
        default="fork",
        help="where the chat template shows earlier turns otherwise (default fork)",
    )
    add_path(parser, "--folder", "DIR", "keep sessions there, over a kill too, and their samples in samples.jsonl")
    add_address(parser, _DEFAULT_PORT, "0 takes a free one")
    add_numbers(
        parser,
        {
            "--context-length": (4096, "most tokens of a request and its answer"),
            "--max-sessions": (100_000, "sessions that may be open at once; more get 429"),
            "--max-turns": (10_000, "turns of a session"),
            "--max-tokens": (2**31 - 1, "tokens sampled in a session (default: any number)"),
            "--max-seconds": (86_400.0, "seconds that a session is served"),
            "--max-body-mb": (32, "megabytes of a request; larger ones get 413"),
        },
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError if an option is wrong, or the port is taken."""
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port}: ports must be within 0 and 65535")
    for name in ("context_length", "max_sessions", "max_turns", "max_tokens", "max_seconds", "max_body_mb"):
        if getattr(arguments, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be above 0")
    return asyncio.run(_serve(arguments, server_key(arguments, _OPERATOR_KEY).value or ""))


async def _serve(arguments: argparse.Namespace, token: str) -> int:
    # Fetched here, as it takes a while that other commands need not wait.
    from rollfeed.app.gateway import serve_gateway
    from rollfeed.app.model import Endpoint
    from rollfeed.gateway.policy import Caps, ServedPolicy

    told = exit_codes.ToldToEnd()
    provider = "embedded" if arguments.engine is None else _KINDS[arguments.engine_kind]
    endpoint = Endpoint(
        provider=provider,
        model=arguments.model,
        api_base=arguments.engine,
        context_length=arguments.context_length,
        api_key_env=arguments.engine_key_env,
    )
    names = tuple(arguments.served_name) or (Path(arguments.model).name,)
    policy = ServedPolicy(
        tokenizer=endpoint.tokenizer,
        context_length=arguments.context_length,
        params=SamplingParams(max_new_tokens=arguments.context_length),
        models=names,
        matching=Matching(arguments.matching),
        rewritten=RewrittenTurns(arguments.rewritten_turns),
        picture_input=endpoint.picture_input,
    )
    caps = Caps(
        max_turns=arguments.max_turns,
        max_tokens=arguments.max_tokens,
        max_seconds=arguments.max_seconds,
        max_body_bytes=arguments.max_body_mb << 20,
    )
    serving = serve_gateway(
        endpoint,
        policy,
        caps=caps,
        max_sessions=arguments.max_sessions,
        folder=arguments.folder,
        token=token,
        host=arguments.host,
        port=arguments.port,
    )
    async with serving as address:
        logger.info("serving %s to agents at %s", names[0], address)
        await told.beside(endpoint.failed())
    return told.exit_code
