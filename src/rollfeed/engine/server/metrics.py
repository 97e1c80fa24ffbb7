"""Counts of the server, for Prometheus and as tokens per second."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from rollfeed.base.sglang_wire import Usage

_WINDOW_SECONDS = 10.0
_SHORTEST_SECONDS = 1.0
_PREFIX = "rollfeed_engine"


class TokenRate:
    """Tokens a second over the last seconds, from totals noted whenever somebody asks or a request ends."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, int]] = deque()

    def note(self, now: float, total: int) -> None:
        """Remember how many tokens had been made at a time; times may not go back."""
        while self._totals and self._totals[0][0] < now - _WINDOW_SECONDS:
            self._totals.popleft()
        if not self._totals or now - self._totals[-1][0] >= _SHORTEST_SECONDS / 10:
            self._totals.append((now, total))

    def rate(self, now: float, total: int) -> float:
        """Return tokens a second since the newest noted total that is at least a second old."""
        old = [noted for noted in self._totals if now - noted[0] >= _SHORTEST_SECONDS]
        base = old[-1] if old else self._totals[0] if self._totals else (now, total)
        return (total - base[1]) / (now - base[0]) if now > base[0] else 0.0


class ServerCounters:
    """Totals since the start."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        """Of requests that have ended."""
        self.request_seconds = 0.0
        self.queue_seconds = 0.0
        self.num_refused = 0
        self.requests_by_reason: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})

    def families(self, usage: Usage) -> Iterator[Metric]:
        """Return all counters and gauges, for Prometheus."""
        ended = CounterMetricFamily(f"{_PREFIX}_requests", "Ended requests by finish reason.", labels=["finish_reason"])
        for reason, count in sorted(self.requests_by_reason.items()):
            ended.add_metric([reason], count)
        yield ended
        yield SummaryMetricFamily(
            f"{_PREFIX}_request_seconds",
            "Seconds from arrival to end.",
            count_value=self.requests_by_reason.total(),
            sum_value=self.request_seconds,
        )
        for name, description, value in (
            ("running_requests", "Requests being decoded.", usage.num_running),
            ("waiting_requests", "Requests that wait for a slot.", usage.num_waiting),
            ("used_tokens", "Tokens held by running requests.", usage.num_used_tokens),
        ):
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", description, value)
        for name, description, total in (
            ("generated_tokens", "Tokens sampled.", usage.generated_tokens),
            ("prompt_tokens", "Prompt tokens of ended requests.", self.prompt_tokens),
            ("cached_tokens", "Prompt tokens that were not computed again.", self.cached_tokens),
            ("refused_requests", "Requests refused because too many wait.", self.num_refused),
            ("queue_seconds", "Seconds that ended requests waited for a slot.", self.queue_seconds),
        ):
            yield CounterMetricFamily(f"{_PREFIX}_{name}", description, total)
