"""The gateway: agents that speak to an API answered by a policy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollfeed.app.model import Endpoint
from rollfeed.base.serving import serve_application
from rollfeed.gateway.gateway_server import GatewayServer
from rollfeed.gateway.policy import Caps, ServedPolicy
from rollfeed.gateway.session_journal import FolderJournal, SessionJournal
from rollfeed.gateway.sessions import Sessions


@asynccontextmanager
async def serve_gateway(
    endpoint: Endpoint,
    policy: ServedPolicy,
    *,
    caps: Caps,
    max_sessions: int,
    folder: Path | None,
    token: str,
    host: str,
    port: int,
) -> AsyncIterator[str]:
    """Serve a gateway while the block runs; give its address.

    Args:
        endpoint: SessionOpened and closed with it.
        policy: What it answers with.
        caps: Bounds of each session.
        max_sessions: That may be open at once.
        folder: Where sessions are kept; in memory without it.
        token: Of operators; empty where none is needed.
        host: To listen on.
        port: To listen on; 0 takes a free one.

    Raises:
        ConfigError: If they cannot be kept there, or the address cannot be listened on.
    """
    journal = SessionJournal() if folder is None else FolderJournal(folder)
    try:
        sessions = Sessions(policy, endpoint, caps=caps, max_sessions=max_sessions, journal=journal)
        application = GatewayServer(sessions, token=token).application()
        async with endpoint, serve_application(application, host=host, port=port) as address:
            yield address
    finally:
        journal.close()
