"""The numbers of a run that goes on, as Prometheus asks for them."""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rollfeed.errors import ConfigError
from rollfeed.types import Drop, FilterDecision, Group, Rollout, StepCommit

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_NO_NAME = re.compile("[^a-zA-Z0-9_]")


class RunNumbers:
    """Fits :class:`rollfeed.protocols.RolloutObserver`, and takes metrics as a tracker does."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._gauges = dict[str, float]()
        self._metrics = dict[str, Mapping[str, float]]()

    def log(self, metrics: Mapping[str, float], *, step: int, kind: str) -> None:
        """Take metrics in place of earlier ones of their kind; may be called in any thread."""
        self._metrics = {**self._metrics, kind: metrics}
        self._gauges["rollfeed_last_metrics_timestamp_seconds"] = time.time()
        self._gauges["rollfeed_last_step"] = step

    def step_started(self, step: int) -> None:
        self._gauges["rollfeed_step"] = step

    def group_submitted(self, group: Group) -> None:
        self._counts["rollfeed_groups", "submitted"] += 1

    def rollout_finished(self, rollout: Rollout) -> None:
        self._counts["rollfeed_rollouts", ""] += 1
        self._counts["rollfeed_response_tokens", ""] += rollout.response_tokens

    def group_decided(self, group: Group, decision: FilterDecision) -> None:
        self._counts["rollfeed_groups", "dropped" if isinstance(decision, Drop) else "kept"] += 1

    def waiting(self, message: str) -> None:
        self._counts["rollfeed_waiting_messages", ""] += 1

    def step_finished(self, commit: StepCommit) -> None:
        self.log(commit.batch.metrics, step=commit.batch.step, kind="step")

    def families(self) -> list[Metric]:
        """Return all numbers so far; counts are of this process."""
        from prometheus_client.core import Metric

        found: dict[str, Metric] = {}
        for (name, state), count in sorted(self._counts.items()):
            family = found.setdefault(name, Metric(name, "Since this process began with the run", "counter"))
            family.add_sample(f"{name}_total", {"state": state} if state else {}, float(count))
        for name, value in list(self._gauges.items()):
            found[name] = Metric(name, "Now", "gauge")
            found[name].add_sample(name, {}, value)
        metrics = {name: value for kind in self._metrics.values() for name, value in kind.items()}
        samples = {_name_and_labels(name): (name, value) for name, value in metrics.items()}
        for (family_name, labels), (name, value) in samples.items():
            family = found.setdefault(family_name, Metric(family_name, f"{name}; see docs/metrics.md", "gauge"))
            family.add_sample(family_name, dict(labels), value)
        return list(found.values())


def _name_and_labels(metric: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the name of a metric for Prometheus, and as a label what the run and not the code has named in it."""
    first, *others = metric.split("/")
    labels: tuple[tuple[str, str], ...] = ()
    if len(others) > 1 and first == "rollout":
        labels, others = (("reason", "/".join(others[1:])),), others[:1]
    elif len(others) > 1:
        labels, others = (("name", "/".join(others[:-1])),), others[-1:]
    name = "_".join(["rollfeed", first, *others]).replace("@", "_at_").replace("^", "_hat_")
    return _NO_NAME.sub("_", name), labels


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if the numbers cannot be served there."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as tried:
                # As servers do it: connections that have just ended are not in the way.
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
    except OSError as error:
        raise ConfigError(
            f"metrics.port = {port}: cannot listen on {host}:{port} ({error.strerror or error}); choose another port, "
            "0 for any, or leave it out"
        ) from error


@asynccontextmanager
async def serving_numbers(numbers: RunNumbers, *, host: str, port: int) -> AsyncIterator[str]:
    """Answer ``GET /metrics`` while the block runs; give the address.

    Raises:
        ConfigError: As :func:`check_port`.
    """
    check_port(host, port)
    # Here, as few runs serve anything.
    from aiohttp import web

    from rollfeed.base.serving import PROMETHEUS_TYPE, prometheus_text, serve_application

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=prometheus_text(numbers.families()), headers={"Content-Type": PROMETHEUS_TYPE})

    application = web.Application()
    application.add_routes([web.get("/metrics", answer)])
    async with serve_application(application, host=host, port=port) as address:
        yield f"{address}/metrics"
