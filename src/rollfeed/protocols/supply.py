"""Sources of new weights, and their way into an engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rollfeed.types import TensorUpdate, WeightProbe, WeightUpdate

Command = Callable[[str, Any], Awaitable[Mapping[str, Any]]]
"""POSTs JSON to a path of a server."""


class CheckpointSource(Protocol):
    """A source of complete checkpoints."""

    def newest(self) -> tuple[int, Path] | None:
        """Return the highest version that is complete, and its folder. Reads the disk."""

    async def wait_for(self, version: int, *, timeout_seconds: float) -> tuple[int, Path]:
        """Return the newest version when it is at least ``version``.

        Raises:
            RunFailedError: If it does not come in time.
        """

    def refuse(self, folder: Path, why: str) -> None:
        """Pass over a version that the engine has not taken: for a while, then until its folder has changed."""

    def probe(self, folder: Path) -> WeightProbe | None:
        """Return what the publisher says of a few texts with the weights of a folder; None where it does not.

        Raises:
            RunFailedError: If what is there is no probe.
        """


class WeightPublisher(Protocol):
    """Brings weights into an engine, and makes sure that it has what it was given."""

    @property
    def policy_version(self) -> int:
        """The version that the engine has."""

    @property
    def is_proving(self) -> bool:
        """Whether :meth:`prove` compares anything; if not, probes need not be made."""

    async def publish(self, update: WeightUpdate) -> None:
        """Have the engine take new weights; see :class:`Engine`. Raises EngineError if it does not."""

    async def prove(self, probe: WeightProbe | None) -> None:
        """Compare what the engine says of a few texts with what the weights that were published last say of them.

        The first time it is what later ones are compared with. None says that nothing is known of the publisher.

        Raises:
            EngineProtocolError: If the engine certainly has other weights; names it, with figures.
            EngineUnavailableError: If the engine does not answer.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return what the last update took, and what the last comparison found, by name; none before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """All that a transport is made from: settings and facts of the servers' table."""

    kind: str
    """The table under ``[engine]``: ``sglang``, or ``openai`` for vLLM and others."""
    folder: Path | None
    """``weights_folder``; None where it is not set."""
    checkpoint: Path | None
    """Folder of the model that is served, perhaps without its weights."""
    untied_head: bool
    """Whether an output head that is the embeddings has to be given under its own name, too."""
    receivers: tuple[str, ...] = ()
    """Addresses in ``weights_receivers``."""
    key: str | None = field(default=None, repr=False)
    """Of the servers, and of what stands in front of them."""


class MetServer(NamedTuple):
    """A server as a transport is told of it."""

    address: str
    num_ranks: int = 1
    """Processes, each on a GPU of its own, that the model is spread over."""
    model_path: str | None = None
    """Folder or name of the checkpoint that it was started with or loaded last, where it tells."""


class WeightTransport(Protocol):
    """Brings tensors of this process to servers. *Extension point* (``weights_transport`` of servers).

    It is made by a class or function that takes a :class:`TransportContext`.
    """

    def meet(self, servers: Sequence[MetServer]) -> None:
        """Learn of the servers at the start, before anything is staged; behind a router others may come later.

        Raises:
            EngineProtocolError: If one of them cannot be given weights in this way.
        """

    async def stage(self, update: TensorUpdate) -> WeightUpdate:
        """Return what every server can take: a :class:`FolderUpdate`, or a :class:`ServerUpdate` of its own.

        Raises:
            EngineProtocolError: If that cannot be made.
        """

    def close(self) -> None:
        """Remove what is temporary."""


@runtime_checkable
class PreparedUpdate(Protocol):
    """A :class:`WeightUpdate` for which servers prepare; later again for one that was away and comes back."""

    policy_version: int

    async def prepare(self, address: str, command: Command) -> int:
        """Do at one server what can be done while it serves the old weights, and return how many bytes were moved.

        Args:
            address: The server's.
            command: POSTs JSON to a path of the server and returns the object of its answer; raises EngineError.
        """


@runtime_checkable
class ServerUpdate(PreparedUpdate, Protocol):
    """A :class:`PreparedUpdate` of a transport's own, which tells a server how to take it.

    Servers are told side by side, each :meth:`prepare` and then :meth:`load`; later both again for one that was away
    and comes back. Of one that has prepared :meth:`load` may not be asked, because it failed meanwhile: no server may
    wait for another one without an end.
    """

    async def load(self, address: str, command: Command) -> int:
        """Have one server serve it, while no request runs there or all are held; as :meth:`prepare`.

        What raises EngineProtocolError has left the old weights as they were, and EngineUnavailableError that it is not
        known which there are.
        """
