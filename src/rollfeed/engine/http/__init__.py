"""HTTP as the engines' clients speak it."""

from rollfeed.engine.http.client import (
    ControlReply,
    Failure,
    Http,
    TryFailedError,
    error_message,
)
from rollfeed.engine.http.connections import BrokenConnectionError, Connections, HttpReply, NotConnectedError

__all__ = [
    "BrokenConnectionError",
    "Connections",
    "ControlReply",
    "Failure",
    "Http",
    "HttpReply",
    "NotConnectedError",
    "TryFailedError",
    "error_message",
]
