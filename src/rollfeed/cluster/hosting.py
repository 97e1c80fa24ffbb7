"""Objects in processes of their own, whose methods are called from this one; Ray's actors are one kind of them.

Invariants: a call ends with what the method returned or raised, or with :class:`HostDiedError`; a process that has
died once is never asked again.
"""

from __future__ import annotations

from typing import Any, Protocol

from rollfeed import errors
from rollfeed.base.importing import import_object
from rollfeed.errors import RollfeedError, RunFailedError, WorkerDiedError, in_one_line

Outcome = tuple[str | None, Any]
"""The kind of error or None, and its text or what was returned."""


class HostDiedError(WorkerDiedError):
    """A process that hosts an object has died, or its machine has, or it cannot be reached."""


class Hosted:
    """An object in the process that hosts it, made by its first call.

    Args:
        factory: Import path of what makes it, ``module:name``.
        args: What that takes.
    """

    def __init__(self, factory: str, *args: Any) -> None:
        self._factory = factory
        self._args = args
        self._object: Any = None

    async def call(self, method: str, *args: Any) -> Outcome:
        """Call an async method; errors are returned, as their classes need not be there where they are told."""
        try:
            if self._object is None:
                self._object = import_object(self._factory, key="cluster")(*self._args)
            return None, await getattr(self._object, method)(*args)
        except RollfeedError as error:
            return type(error).__name__, str(error)
        except Exception as error:  # whatever a method raises is its caller's
            return RunFailedError.__name__, in_one_line(error)


def returned(outcome: Outcome) -> Any:
    """Return what a method has returned, or raise what it raised."""
    kind, value = outcome
    if kind is None:
        return value
    raise getattr(errors, kind, RunFailedError)(value)


class Host(Protocol):
    """A process with a :class:`Hosted` object."""

    name: str
    """With its node, for messages."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object; calls overlap, and begin in any order.

        Raises:
            HostDiedError: If the process dies before it has answered.
            RollfeedError: What the method raises; RunFailedError for errors that are none of ours.
        """

    def kill(self) -> None:
        """End the process at once; whoever waits for a call gets a HostDiedError."""


class Hosting(Protocol):
    """Makes hosts. Entered with ``async with``; leaving it ends all of them, and what they have started."""

    async def __aenter__(self) -> Hosting: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    @property
    def num_nodes(self) -> int:
        """Machines that hosts can be on."""

    async def reserve(self, num_places: int) -> None:
        """Keep room for rollout workers, spread over the machines; called once, before the first one is started.

        Raises:
            RunFailedError: If there is not room for all of them in time.
        """

    async def start(self, factory: str, *args: Any, place: int | None) -> Host:
        """Start a process for the object that ``factory`` makes of ``args``, which can be pickled.

        It is in the room of the rollout worker ``place``, or anywhere.
        """

    def share(self, value: Any) -> Any:
        """Return what stands for a large value in the arguments of calls, so that each machine gets it once."""
