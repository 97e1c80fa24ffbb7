"""What the server counts, as Prometheus text and as tokens a second."""

from __future__ import annotations

from collections import Counter, deque

from rollfeed.engine.server.state import Usage

_WINDOW_SECONDS = 10.0
_SHORTEST_SECONDS = 1.0
_PREFIX = "rollfeed_engine"


class Throughput:
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


class Counters:
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

    def prometheus(self, usage: Usage, *, generated_tokens: int) -> str:
        """Return all counters and gauges in Prometheus' text format.

        Args:
            usage: What runs and waits now.
            generated_tokens: Those of requests that still run included.
        """
        lines: list[str] = []

        def add(name: str, kind: str, description: str, *samples: tuple[str, float]) -> None:
            lines.append(f"# HELP {_PREFIX}_{name} {description}")
            lines.append(f"# TYPE {_PREFIX}_{name} {kind}")
            lines.extend(f"{_PREFIX}_{name}{labels} {value}" for labels, value in samples)

        reasons = sorted(self.requests_by_reason.items())
        num_requests = self.requests_by_reason.total()
        add("running_requests", "gauge", "Requests being decoded.", ("", usage.num_running))
        add("waiting_requests", "gauge", "Requests that wait for a slot.", ("", usage.num_waiting))
        add("used_tokens", "gauge", "Tokens held by running requests.", ("", usage.num_used_tokens))
        add("generated_tokens_total", "counter", "Tokens sampled.", ("", generated_tokens))
        add("prompt_tokens_total", "counter", "Prompt tokens of ended requests.", ("", self.prompt_tokens))
        add("cached_tokens_total", "counter", "Prompt tokens that were not computed again.", ("", self.cached_tokens))
        add(
            "requests_total",
            "counter",
            "Ended requests by finish reason.",
            *((f'{{finish_reason="{reason}"}}', count) for reason, count in reasons),
        )
        add("refused_requests_total", "counter", "Requests refused because too many wait.", ("", self.num_refused))
        add(
            "request_seconds",
            "summary",
            "Seconds from arrival to end.",
            ("_sum", self.request_seconds),
            ("_count", num_requests),
        )
        add(
            "queue_seconds_total", "counter", "Seconds that ended requests waited for a slot.", ("", self.queue_seconds)
        )
        return "\n".join(lines) + "\n"
