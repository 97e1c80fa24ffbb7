"""What goes wrong, and which request meets it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from rollfeed.errors import ConfigError


def check_limits(*checks: tuple[bool, str]) -> None:
    """Raise ConfigError with the message of the first check that does not hold."""
    for holds, message in checks:
        if not holds:
            raise ConfigError(message)


class FaultKind(StrEnum):
    """What goes wrong."""

    REFUSE = "refuse"
    """Stops listening and drops all connections, for ``seconds`` or for good, as soon as it is ordered; with a
    ``path``, as soon as a request meets it."""
    HANG = "hang"
    """Takes the request and never answers."""
    RESET = "reset"
    """Resets the connection after ``fraction`` of the reply's body."""
    TRUNCATED_JSON = "truncated_json"
    """A complete reply whose body ends after ``fraction`` of the JSON."""
    STATUS = "status"
    """An error reply with ``status``."""
    DIE = "die"
    """Ends ``seconds`` after it was ordered, or with a ``path`` after a request met it: the process if it serves
    nothing else, else this server's sockets."""
    DELAY = "delay"
    """Handles the request only after ``seconds``."""
    SLOW_HEALTH = "slow_health"
    """DELAY for ``/health`` and ``/health_generate``."""
    SLOW_ABORT = "slow_abort"
    """Answers ``/abort_request`` at once and aborts after ``seconds``."""
    WRONG_LOGPROB_COUNT = "wrong_logprob_count"
    """One log-probability less than tokens."""
    MISSING_FINISH_REASON = "missing_finish_reason"
    """A reply without ``finish_reason``."""
    STALE_VERSION = "stale_version"
    """A reply with the weight version before the latest change."""


_AT_ONCE = (FaultKind.DIE, FaultKind.REFUSE)
_HEALTH_PATHS = ("/health", "/health_generate")
_DEFAULT_PATHS = {FaultKind.SLOW_HEALTH: _HEALTH_PATHS, FaultKind.SLOW_ABORT: ("/abort_request",)}


class ServerFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that goes wrong, with some or all requests.

    Raises:
        ConfigError: If a value is outside its range.
    """

    kind: FaultKind
    path: str | None = None
    """Requests to this path only; None is ``/generate``, or what the kind is about. ``*`` is all of them."""
    times: int | None = None
    """The next so many requests to the path, then never again; None has no end."""
    skip: int = 0
    """So many requests to the path are spared first."""
    probability: float = 1.0
    """Chance that a request which is not spared meets it, drawn from ``seed``."""
    seed: int = 0
    seconds: float | None = None
    """How long, for DELAY, SLOW_*, REFUSE (None is for good), HANG (None is for ever) and DIE (None is now)."""
    status: int = 500
    """For STATUS."""
    message: str = "injected fault"
    """For STATUS."""
    fraction: float = 0.5
    """For RESET and TRUNCATED_JSON; 0 resets before the first byte of the reply."""

    def __post_init__(self) -> None:
        check_limits(
            (self.times is None or self.times >= 1, f"times = {self.times}: must be at least 1"),
            (self.skip >= 0, f"skip = {self.skip}: must be at least 0"),
            (0.0 <= self.probability <= 1.0, f"probability = {self.probability}: must be within 0 and 1"),
            (self.seconds is None or self.seconds >= 0.0, f"seconds = {self.seconds}: must be at least 0"),
            (400 <= self.status <= 599, f"status = {self.status}: must be an error, 400 to 599"),
            (0.0 <= self.fraction < 1.0, f"fraction = {self.fraction}: must be at least 0 and below 1"),
        )

    @property
    def needs_no_request(self) -> bool:
        """Whether it happens when it is ordered."""
        return self.kind in _AT_ONCE and self.path is None

    def concerns(self, path: str) -> bool:
        """Say whether requests to ``path`` can meet it."""
        if self.path is not None:
            return self.path in (path, "*")
        if self.kind in _AT_ONCE:
            return False
        return path in _DEFAULT_PATHS.get(self.kind, ("/generate",))


class FaultBook:
    """The faults in force; every request takes at most one, from the oldest that has one for it."""

    def __init__(self, faults: Iterable[ServerFault] = ()) -> None:
        self._entries = [_Entry(fault) for fault in faults]
        self.fired: Counter[str] = Counter()
        """How many requests have met each kind."""

    def add(self, fault: ServerFault) -> None:
        """Put a fault in force."""
        self._entries.append(_Entry(fault))

    def clear(self) -> None:
        """Let nothing go wrong any more."""
        self._entries.clear()

    def in_force(self) -> Sequence[ServerFault]:
        """Return those in force, as they were ordered."""
        return [entry.fault for entry in self._entries]

    def take(self, path: str) -> ServerFault | None:
        """Return the fault that the next request to a path meets."""
        for entry in self._entries:
            if entry.fault.concerns(path) and entry.meets():
                if entry.left == 0:
                    self._entries.remove(entry)
                self.fired[entry.fault.kind] += 1
                return entry.fault
        return None

    def take_ordered(self) -> list[ServerFault]:
        """Remove and return the faults that need no request."""
        found = [entry.fault for entry in self._entries if entry.fault.needs_no_request]
        self._entries = [entry for entry in self._entries if not entry.fault.needs_no_request]
        self.fired.update(fault.kind for fault in found)
        return found


class _Entry:
    def __init__(self, fault: ServerFault) -> None:
        self.fault = fault
        self.left = fault.times
        self._skip = fault.skip
        self._random = random.Random(fault.seed)

    def meets(self) -> bool:
        if self._skip > 0:
            self._skip -= 1
            return False
        if self._random.random() >= self.fault.probability:
            return False
        if self.left is not None:
            self.left -= 1
        return True
