"""What happened between this client and its servers, for the metrics of a run."""

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
    redispatched_requests: int = 0
    """Tries that went on from the tokens known after a worker was lost or had stopped a request unasked."""
    connection_failures: int = 0
    """Tries that ended without a whole HTTP reply."""
    server_errors: int = 0
    """Replies with a 5xx status."""
    refused_requests: int = 0
    """Replies with status 429."""
    broken_replies: int = 0
    """Replies that were not JSON to their end."""
    rejected_replies: int = 0
    """Whole replies that broke the contract, or said that the request can never be served."""
    stale_replies: int = 0
    """Replies sampled by weights older than the current version; thrown away."""
    timed_out_requests: int = 0
    dead_workers: int = 0
    """Times that a worker was taken out."""
    readmitted_workers: int = 0
    failed_aborts: int = 0
    """Aborts that a worker did not confirm."""
    orphaned_requests: int = 0
    """Tries given up while an engine may have been working on them."""
    orphaned_tokens: int = 0
    """Most tokens that those may have cost: what they were asked for."""
    weight_updates: int = 0

    def totals(self) -> Mapping[str, float]:
        """Return all of them by name."""
        return {name: float(value) for name, value in asdict(self).items()}
