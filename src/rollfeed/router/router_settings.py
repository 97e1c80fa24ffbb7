"""Settings of a router."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollfeed.errors import ConfigError


class RoutingPolicy(StrEnum):
    """Ways to choose among the workers that may have a request."""

    PREFIX = "prefix"
    """Where most of the prompt is computed already, unless another one has much less to do; sessions stay."""
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Bounds and patience.

    Raises:
        ConfigError: If one is out of its bounds.
    """

    policy: RoutingPolicy = RoutingPolicy.PREFIX
    max_in_flight: int = 4096
    """Requests at one worker; more wait here."""
    max_waiting: int = 16_384
    """Requests that wait here; more are answered 429."""
    wait_seconds: float = 300.0
    """For a worker to be free and to have the current weights; then 503."""
    request_seconds: float = 3600.0
    """For one request at workers, all tries together."""
    max_tries: int = 3
    """Of one request, at different workers where there are some."""
    probe_seconds: float = 5.0
    """Between two probes of a worker."""
    probe_timeout_seconds: float = 5.0
    probes_until_down: int = 3
    """Failed ones in a row."""
    control_seconds: float = 30.0
    """For a worker to answer an abort, a pause or the like."""
    update_seconds: float = 600.0
    """For a worker to load weights, and for an update in several calls to be finished."""
    late_seconds: float = 60.0
    """For whoever publishes weights to workers directly to come to the last one; then it is told to load them."""
    drain_seconds: float = 10.0
    """For aborted requests to end before an update; then their connections are closed."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, str) and value <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be above 0")
