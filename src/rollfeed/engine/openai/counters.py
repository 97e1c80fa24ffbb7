"""What happened between this client and its server, for the metrics of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the engine was made."""

    requests: int = 0
    """Requests of the caller."""
    retries: int = 0
    """Tries after the first one of a request, for whatever reason."""
    resumed_requests: int = 0
    """Tries that went on from tokens which an earlier one had sampled."""
    connection_failures: int = 0
    """Tries that ended without a whole HTTP reply."""
    server_errors: int = 0
    """Replies with a 5xx status, or errors within a stream."""
    refused_requests: int = 0
    """Replies with status 429."""
    broken_replies: int = 0
    """Replies that were not JSON to their end."""
    stale_replies: int = 0
    """Replies from older weights than those published, as of a server that was started again."""
    unasked_aborts: int = 0
    """Tries that the server ended before their first token."""
    rejected_replies: int = 0
    """Whole replies that broke the contract, or said that the request can never be served."""
    timed_out_requests: int = 0
    closed_requests: int = 0
    """Requests whose connection was closed while the server worked on them; it stops when it notices."""
    closed_tokens: int = 0
    """Most tokens that those may still have cost: what they were asked for and had not returned."""
    weight_updates: int = 0

    def totals(self) -> Mapping[str, float]:
        """Return all of them by name."""
        return {name: float(value) for name, value in asdict(self).items()}
