"""Counts of what happened between this client and its servers, for the metrics of a run."""

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
    resumed_requests: int = 0
    """Tries that went on from tokens which an earlier one had sampled."""
    put_back_requests: int = 0
    """Times that a request was taken from a full server with what it had, to go on when there is room."""
    connection_failures: int = 0
    """Tries that ended without a whole HTTP reply."""
    server_errors: int = 0
    """Replies with a 5xx status, or errors within a stream."""
    refused_requests: int = 0
    """Replies with status 429."""
    broken_replies: int = 0
    """Replies that were not JSON to their end."""
    rejected_replies: int = 0
    """Whole replies that broke the contract, or said that the request can never be served."""
    stale_replies: int = 0
    """Replies sampled by weights older than the current version; thrown away."""
    unasked_aborts: int = 0
    """Tries that the server ended before their first token."""
    timed_out_requests: int = 0
    """Requests without an answer in time."""
    dead_workers: int = 0
    """Times that a worker was taken out."""
    readmitted_workers: int = 0
    """Times that one came back."""
    failed_aborts: int = 0
    """Aborts that a worker did not confirm."""
    orphaned_requests: int = 0
    """Tries given up while an engine may have been working on them, until that is told."""
    orphaned_tokens: int = 0
    """Most tokens that those may have cost: what they were asked for."""
    closed_requests: int = 0
    """Tries given up by closing their connection, at which the server stops when it notices."""
    closed_tokens: int = 0
    """Most tokens that those may still have cost: what they were asked for and had not returned."""
    sampled_tokens: int = 0
    """Tokens of whole replies."""
    stale_cache_tokens: int = 0
    """Those among them that were decoded on keys and values of weights older than their own."""
    session_choices: int = 0
    """Tries sent to the server of their conversation."""
    group_choices: int = 0
    """Tries sent to the server of the other samples of their prompt."""
    prefix_choices: int = 0
    """Tries sent to a server for what it had computed of their tokens."""
    load_choices: int = 0
    """Tries sent to the server with the least to do, or in turn."""
    believed_cached_tokens: int = 0
    """Prompt tokens that the chosen servers were believed to have computed before."""
    told_cached_tokens: int = 0
    """Prompt tokens that servers say they had, of whole replies."""
    sent_tokens: int = 0
    """Prompt tokens of whole replies, with what earlier tries had sampled."""
    weight_updates: int = 0
    """Versions published from here."""

    def totals(self) -> Mapping[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}


@dataclass(slots=True)
class UpdateCosts:
    """Costs of the last update."""

    prepare_seconds: float = 0.0
    """Until every server was prepared; they served meanwhile."""
    pause_seconds: float = 0.0
    """For which a server stood still, the longest of all."""
    num_bytes: int = 0
    """Moved to the servers, all together."""

    def metrics(self) -> Mapping[str, float]:
        return {
            #: engine/weights_prepare_seconds: of the last update, seconds in which servers prepared while they served
            "weights_prepare_seconds": self.prepare_seconds,
            #: engine/weights_pause_seconds: of the last update, seconds that a server stood still, the longest
            "weights_pause_seconds": self.pause_seconds,
            #: engine/weights_bytes: of the last update, bytes moved to all servers together
            "weights_bytes": float(self.num_bytes),
        }
