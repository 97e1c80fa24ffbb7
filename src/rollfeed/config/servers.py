"""Settings that every kind of server has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from rollfeed.config.api_key import KeyVariable
from rollfeed.config.paths import checked_address
from rollfeed.config.section import Resume, Section


class Routing(StrEnum):
    """Ways to choose a server for a request."""

    PREFIX = "prefix"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"


class ServerSettings(Section, ABC, resume=Resume.FREE):
    """Time limits and attempts with servers, and their key."""

    api_key_env: KeyVariable | None = None
    """Name of the environment variable that holds the key of all servers, and of what stands in front of them. The key
    itself is stored nowhere.
    """
    max_connections: int | None = Field(default=None, ge=1, le=1_000_000)
    """Connections for generation; by default one a request."""
    request_timeout_seconds: float = Field(default=900.0, gt=0.0, le=604_800.0, strict=False)
    """For one request from its turn on: all its tries, and the pauses between them, together."""
    max_tries: int = Field(default=10, ge=1, le=1000)
    """Of one request, when connections fail or replies have a 5xx status; what a server calls wrong fails at once."""
    probe_interval_seconds: float = Field(default=5.0, gt=0.0, le=3600.0, strict=False)
    """Between two health probes of a server."""
    probe_timeout_seconds: float = Field(default=5.0, gt=0.0, le=3600.0, strict=False)
    """For the answer to a probe."""
    probes_until_dead: int = Field(default=3, ge=1, le=1000)
    """Failed probes in a row after which a server has no more requests; it returns when it is healthy and has the
    current weights.
    """
    startup_timeout_seconds: float = Field(default=60.0, gt=0.0, le=86_400.0, strict=False)
    """For every server to be healthy, and to answer a first request where one is needed, when the run starts."""
    control_timeout_seconds: float = Field(default=30.0, gt=0.0, le=86_400.0, strict=False)
    """For an abort, a pause or a look at the load."""
    update_timeout_seconds: float = Field(default=600.0, gt=0.0, le=86_400.0, strict=False)
    """For a server to load new weights."""
    late_update_seconds: float = Field(default=30.0, gt=0.0, le=86_400.0, strict=False)
    """For the last servers to load new weights once half of them have, or four times as long as those took; then they
    are taken out until they have them. No request is sent meanwhile.
    """
    routing: Routing = Field(default=Routing.PREFIX, strict=False)
    """Which server gets a request: `"prefix"`, the one that has computed most of its tokens, unless others have that
    much less to do, and turns of a conversation and samples of a prompt stay together; `"least_loaded"`, the one with
    the fewest requests; or `"round_robin"`, each in turn. A router chooses itself.
    """
    weights_folder: str | None = None
    """Where new weights are written for the servers to load, a folder that they can read under the same path; by
    default a temporary one, which is enough for servers on this machine.
    """
    weights_transport: str = Field(default="disk", min_length=1)
    """How new weights reach the servers: `disk`; `tensors`, from this process to servers on its host; `nccl`, by
    broadcast; `delta`, what has changed only; `adapter`, alone what `[train.lora]` trains; or the import path of a
    class or function that makes your own `WeightTransport` from a `TransportContext` (docs/weights.md).
    """
    weights_receivers: tuple[Annotated[str, AfterValidator(checked_address)], ...] = Field(default=(), strict=False)
    """With `delta`: addresses of `rollfeed serve weights`, one on each host of servers, with the servers' key. Without
    one the servers receive by themselves, which `rollfeed serve engine` does.
    """

    @model_validator(mode="after")
    def _receivers_are_asked(self) -> Self:
        if self.weights_receivers and self.weights_transport in ("adapter", "disk", "tensors", "nccl"):
            raise ValueError(f"weights_receivers are for weights_transport = 'delta', not {self.weights_transport!r}")
        return self

    @property
    @abstractmethod
    def addresses(self) -> tuple[str, ...]:
        """The servers' addresses; empty behind a router, and before they are launched."""

    @abstractmethod
    def at(self, addresses: tuple[str, ...]) -> ServerSettings:
        """Return the settings for servers at these addresses."""

    @property
    @abstractmethod
    def fixed_concurrency(self) -> int | None:
        """Requests at all servers together; None where the number is to be found."""

    @property
    @abstractmethod
    def most_concurrency(self) -> int:
        """Most requests at all servers together."""


def checked_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses, of which none may be given twice."""
    if len(set(addresses)) != len(addresses):
        raise ValueError("an address is given twice; remove one")
    return addresses
