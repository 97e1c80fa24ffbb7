"""The messages between the process of a run and its rollout workers, as msgpack.

What is asked for is an order, what is told an event. An attempt is one execution of a group by one worker: its number
is never used again, so that what a lost worker has told late concerns nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from rollfeed.rewards.judging import JudgeCounts
from rollfeed.store.turns import decode_turn, encode_turn
from rollfeed.types import Turn


class WorkerFacts(NamedTuple):
    """Tells what the engine of a worker is like, once it has started."""

    policy_version: int
    precision: str
    max_running_requests: int
    is_exact: bool


class KeptTurn(msgspec.Struct, array_like=True, frozen=True):
    """A turn of a rollout, as the turn journal keeps it."""

    rollout_id: int
    kind: str
    turn: bytes

    @classmethod
    def of(cls, rollout_id: int, turn: Turn) -> KeptTurn:
        return cls(rollout_id, *encode_turn(turn))

    def read(self) -> Turn:
        return decode_turn(self.kind, self.turn)


class AnswerGroup(msgspec.Struct, array_like=True, frozen=True, tag="answer"):
    """Asks for a group to be answered and scored, from what there is of it."""

    attempt: int
    step: int
    group: bytes
    turns: list[KeptTurn] = []


class CancelGroup(msgspec.Struct, array_like=True, frozen=True, tag="cancel"):
    """Asks for an attempt to be ended at once."""

    attempt: int


class AbortRequests(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """Asks for requests to be aborted; all, and those that come before the next group, or one."""

    request_id: str | None = None


class RolloutGenerated(msgspec.Struct, array_like=True, frozen=True, tag="generated"):
    """Tells of a rollout that has ended, unscored."""

    attempt: int
    member: int
    rollout: bytes


class RolloutFailed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """Tells of a failure that counts for the budget."""

    attempt: int
    cause: str
    where: str


class TurnWritten(msgspec.Struct, array_like=True, frozen=True, tag="turn"):
    """Tells of a turn that is to be kept before its rollout goes on."""

    attempt: int
    turn: KeptTurn


class GroupEnded(msgspec.Struct, array_like=True, frozen=True, tag="ended"):
    """Tells what became of an attempt."""

    attempt: int
    rollouts: list[bytes] = []
    num_succeeded: int = 0
    """Of its rollouts, for the budget."""
    reward_failures: dict[str, int] = {}
    """Gradings that failed, by outcome."""
    error: tuple[str, str] | None = None
    """Kind and text, where there are no rollouts."""


class IsolationFound(msgspec.Struct, array_like=True, frozen=True, tag="isolation"):
    """Tells at which isolation level programs of the policy run."""

    level: str
    network_cut: bool
    files_hidden: bool
    detail: str


class JudgesAsked(msgspec.Struct, array_like=True, frozen=True, tag="judges"):
    """Tells what judges were asked since the last event of this kind."""

    counts: JudgeCounts


class WorkerMetrics(msgspec.Struct, array_like=True, frozen=True, tag="metrics"):
    """Tells the metrics of a worker's engine."""

    values: dict[str, float]


class OutputWritten(msgspec.Struct, array_like=True, frozen=True, tag="output"):
    """Tells of lines that functions have printed, or that processes of a pool have logged."""

    name: str
    """Of the file of the run directory that they belong to."""
    lines: bytes


class LineLogged(msgspec.Struct, array_like=True, frozen=True, tag="logged"):
    """Tells of a record of the worker's log."""

    logger: str
    level: int
    text: str


Order = AnswerGroup | CancelGroup | AbortRequests
_OfAttempt = RolloutGenerated | RolloutFailed | TurnWritten | GroupEnded
Event = _OfAttempt | IsolationFound | JudgesAsked | WorkerMetrics | OutputWritten | LineLogged
read_orders = msgspec.msgpack.Decoder(list[Order]).decode
read_events = msgspec.msgpack.Decoder(list[Event]).decode


def pack(messages: Iterable[Order] | Iterable[Event]) -> bytes:
    """Return messages as bytes."""
    return msgspec.msgpack.encode(list(messages))
