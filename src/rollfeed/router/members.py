"""Workers of a router, and the requests that it has passed on to them."""

from __future__ import annotations

import asyncio
import uuid
from enum import StrEnum
from typing import Any

from rollfeed.router.request_fields import RequestFields
from rollfeed.router.worker_kinds import FoundWorker, WorkerKind


class MemberState(StrEnum):
    """Whether a worker may have requests, and why not."""

    JOINING = "joining"
    """It has not answered as a worker yet, and is waited for."""
    READY = "ready"
    BEHIND = "behind"
    """It serves older weights."""
    DOWN = "down"
    """Its probes fail."""
    OUT = "out"
    """Its weights are not known since an update failed; it must load them."""


class Member:
    """One worker."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.member_id = str(uuid.uuid4())
        self.joined_at = asyncio.get_running_loop().time()
        self.kind: WorkerKind | None = None
        self.state = MemberState.JOINING
        self.reason = "it has not answered yet"
        self.model = "unknown"
        self.num_ranks = 1
        """Processes that the model is spread over."""
        self.policy_version = 0
        self.newest_version = 0
        """That it has served; one that serves an older one was started again."""
        self.distrusted_version = -1
        """Newest version that an update may have given it half of; -1 where its word for its weights counts."""
        self.behind_since = 0.0
        """Time of the event loop since which others have newer weights; long ago where it has lost them itself."""
        self.version_name: str | None = None
        """As it calls its weights; None where it keeps no name."""
        self.model_path: str | None = None
        """By its own word, which updates by tensors do not change."""
        self.folder: str | None = None
        """That its weights were loaded from, where that is known."""
        self.transfers: set[Transfer] = set()
        self.num_tokens = 0
        self.num_running = 0
        self.num_waiting = 0
        self.kv_use: float | None = None
        self.num_failed_probes = 0
        self.num_failed_loads = 0
        self.next_load = 0.0
        """Time of the event loop from which on it may be told again to load the current weights."""
        self.is_suspect = False
        """Whether a connection to it has failed since its last good probe."""
        self.lacks: set[str] = set()
        """Paths that it has answered 404 or 405."""
        self.woken = asyncio.Event()
        """Set to have it probed now."""

    @property
    def num_requests(self) -> int:
        """Those passed on to it that have not ended."""
        return len(self.transfers)

    def is_at(self, policy_version: int) -> bool:
        """Whether it may have requests of a version."""
        return self.state is MemberState.READY and self.policy_version == policy_version

    def become(self, found: FoundWorker) -> None:
        """Be a server that has just been met; what was known of another one at its address counts no more."""
        self.kind, self.model, self.num_ranks = found
        self.state, self.reason = MemberState.JOINING, "it has not said which weights it serves"
        self.version_name, self.policy_version, self.newest_version, self.distrusted_version = None, 0, 0, -1
        self.lacks.clear()

    def set_state(self, state: MemberState, reason: str = "") -> None:
        """Let it have requests, or say why not; what it has goes elsewhere when it is lost."""
        self.state, self.reason = state, reason
        if state is MemberState.DOWN:
            for transfer in tuple(self.transfers):
                transfer.interrupt(self)


class Transfer:
    """A client's request on its way."""

    __slots__ = (
        "avoided",
        "fields",
        "given",
        "is_aborted",
        "is_crossing",
        "is_interrupted",
        "member",
        "path",
        "policy_version",
        "scope",
        "waiter",
    )

    def __init__(self, path: str, fields: RequestFields, given: dict[str, Any] | None = None) -> None:
        self.path = path
        self.fields = fields
        self.given = given
        """The body, where a cache of spans has to see it."""
        self.member: Member | None = None
        """Where it is; None while it waits."""
        self.policy_version = 0
        """That it was admitted to."""
        self.avoided: set[Member] = set()
        """Workers where it has failed."""
        self.scope: asyncio.Timeout | None = None
        """Of the try under way."""
        self.waiter: asyncio.Future[None] | None = None
        self.is_aborted = False
        self.is_interrupted = False
        self.is_crossing = False
        """Whether several versions have sampled its reply."""

    def interrupt(self, member: Member) -> None:
        """Give up the try that is at a worker."""
        if self.member is member and self.scope is not None and not self.scope.expired():
            self.is_interrupted = True
            self.scope.reschedule(asyncio.get_running_loop().time())

    def abort(self) -> None:
        """Note that the client wants it to end; one that waits ends at once."""
        self.is_aborted = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
