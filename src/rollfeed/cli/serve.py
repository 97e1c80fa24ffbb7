"""``rollfeed serve``: a model, a gateway to one, a router of many, a fake of one, graders, or weights."""

from __future__ import annotations

from rollfeed.cli import serve_engine, serve_fake, serve_gateway, serve_reward, serve_router, serve_weights
from rollfeed.cli.arguments import Parsers, add_actions


def register(commands: Parsers) -> None:
    """Add the command and its actions to the parser."""
    actions = add_actions(commands, "serve")
    for action in (serve_engine, serve_router, serve_gateway, serve_fake, serve_reward, serve_weights):
        action.register(actions)
