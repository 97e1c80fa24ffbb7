"""Ports of loopback that are nobody else's, whether somebody listens there at the moment or not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port(port: int = 0) -> Iterator[int]:
    """Hold a port, any or a certain one, that no other process is given meanwhile for listening or for connecting.

    Who names it can listen there, again and again, as all servers do that may use an address again at once; in between
    connections are refused.
    """
    with socket.socket() as holding:
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holding.bind(("127.0.0.1", port))
        yield holding.getsockname()[1]
