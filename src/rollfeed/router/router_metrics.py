"""Counters of a router, as Prometheus reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rollfeed.router.fleet import Fleet
from rollfeed.router.members import MemberState
from rollfeed.router.span_cache import SpanCacheUse

_COUNTERS = {
    "retries": "Tries that were made again at another worker",
    "stale_replies": "Replies of older weights than their requests were admitted to, which no client has seen",
    "crossing_replies": "Replies whose tokens were sampled by several versions",
    "prompt_tokens": "Tokens of prompts that were passed on",
    "cached_tokens": "Those of them that their worker was believed to have computed",
}
_SPAN_GAUGES = {
    "num_bytes": "Bytes that the span cache takes",
    "num_tokens": "Tokens in the span cache",
    "num_spans": "Spans in the span cache",
}
_SPAN_COUNTERS = {
    "num_rewritten": "Prompts that came as text",
    "num_reused_tokens": "Tokens of these that were in the span cache",
    "num_kept": "Replies that the span cache keeps, or has kept",
    "num_not_kept": "Replies that did not say exactly what was sampled",
    "num_evicted_tokens": "Tokens that the span cache has forgotten",
}


def span_families(use: SpanCacheUse) -> Iterable[Metric]:
    """Return the numbers of a span cache."""
    for field, told in _SPAN_GAUGES.items():
        yield GaugeMetricFamily(f"rollfeed_router_span_cache_{field.removeprefix('num_')}", told, getattr(use, field))
    for field, told in _SPAN_COUNTERS.items():
        yield CounterMetricFamily(f"rollfeed_router_span_cache_{field.removeprefix('num_')}", told, getattr(use, field))


def router_families(fleet: Fleet, replies: Counter[tuple[str, int]]) -> Iterable[Metric]:
    """Return the router's numbers, and those of its workers."""
    for name, told in _COUNTERS.items():
        yield CounterMetricFamily(f"rollfeed_router_{name}", told, fleet.counters[name])
    ended = CounterMetricFamily("rollfeed_router_requests", "Answered requests", labels=("path", "status"))
    for (path, status), number in replies.items():
        ended.add_metric((path, str(status)), number)
    yield ended
    chosen = CounterMetricFamily("rollfeed_router_choices", "Choices of the policy prefix", labels=("reason",))
    for name, number in fleet.counters.items():
        if name.startswith("chosen_by_"):
            chosen.add_metric((name.removeprefix("chosen_by_"),), number)
    yield chosen
    yield GaugeMetricFamily("rollfeed_router_policy_version", "Version that is served", fleet.policy_version)
    yield GaugeMetricFamily("rollfeed_router_waiting", "Requests that wait here", fleet.num_waiting)
    yield GaugeMetricFamily("rollfeed_router_is_closed", "Whether nothing is admitted", float(bool(fleet.closed_by)))
    states = GaugeMetricFamily("rollfeed_router_workers", "Workers by state", labels=("state",))
    for state in MemberState:
        states.add_metric((state.value,), sum(member.state is state for member in fleet))
    yield states
    gauges = {
        name: GaugeMetricFamily(f"rollfeed_router_worker_{name}", told, labels=("worker",))
        for name, told in {
            "requests": "Requests that are there from here",
            "policy_version": "Version that it serves",
            "running": "Requests that it says run",
            "waiting": "Requests that it says wait there",
            "kv_use": "Used share of its KV cache, by its word",
        }.items()
    }
    for member in fleet:
        values = (
            member.num_requests,
            member.policy_version,
            member.num_running,
            member.num_waiting,
            member.kv_use if member.kv_use is not None else float("nan"),
        )
        for gauge, value in zip(gauges.values(), values, strict=True):
            gauge.add_metric((member.address,), value)
    yield from gauges.values()
