"""Counts over all sessions, as Prometheus reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

COUNTED: Mapping[str, str] = {
    "turns": "Turns that were sampled and answered.",
    "tokens": "Tokens of these turns.",
    "forks": "Requests whose earlier turns were rendered anew, in a context of its own.",
    "lost_tokens": "Sampled tokens that such a context shows as the tokenizer makes them of their text.",
    "dropped_turns": "Turns of sessions that ended, of which nothing is trained.",
    "dropped_tokens": "Tokens of these turns.",
    "differing_contexts": "Contexts of ended sessions that the chat template shows otherwise than they were sent.",
    "replayed_requests": "Requests that were answered from the record.",
    "cancelled_requests": "Requests that ended before they were answered.",
    "aborted_tokens": "Tokens of turns that the engine was told to abort.",
    "silent_connections": "Connections that were closed because no request came.",
    "finished_sessions": "Sessions that became samples.",
    "dropped_sessions": "Sessions that were deleted.",
    "samples": "Samples of these sessions.",
}


@dataclass(slots=True)
class Totals:
    """Counts over all sessions."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Requests that were answered with an error, by its kind."""


def families(totals: Totals, *, num_open: int) -> Iterator[Metric]:
    """Return what is counted, for Prometheus."""
    yield GaugeMetricFamily("rollfeed_gateway_open_sessions", "Sessions that have not ended.", num_open)
    for name, told in COUNTED.items():
        yield CounterMetricFamily(f"rollfeed_gateway_{name}", told, totals.counts[name])
    refused = CounterMetricFamily(
        "rollfeed_gateway_refused_requests", "Requests that were answered with an error.", labels=["kind"]
    )
    for kind, count in totals.refused.items():
        refused.add_metric([kind], count)
    yield refused
