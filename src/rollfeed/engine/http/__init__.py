"""HTTP as the engines' client speaks it."""

from rollfeed.engine.http.client import ControlReply, Failure, Http, TryFailedError, error_message
from rollfeed.engine.http.connections import LARGEST_BODY_BYTES, Connections, NotConnectedError
from rollfeed.engine.http.incoming import BrokenConnectionError
from rollfeed.engine.http.json_ids import json_ids

__all__ = [
    "LARGEST_BODY_BYTES",
    "BrokenConnectionError",
    "Connections",
    "ControlReply",
    "Failure",
    "Http",
    "NotConnectedError",
    "TryFailedError",
    "error_message",
    "json_ids",
]
