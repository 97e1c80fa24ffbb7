"""A port that stays a server's own while the server is away."""

from __future__ import annotations

import socket


def hold_port(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Return a socket that has a port at which nobody listens: a free one for port 0.

    While it is open no other process is given the port, connections to it are refused, and a server that lets its
    address be reused may listen there.

    Raises:
        OSError: If the port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    held = socket.socket(family, kind, protocol)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
    except OSError:
        held.close()
        raise
    return held
