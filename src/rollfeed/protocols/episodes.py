"""Environments that answer back: one protocol for problems of one turn and of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from rollfeed.protocols.rollouts import Environment
from rollfeed.types import Message, Verdict

MULTI_TURN = "multi_turn"
"""Key of a prompt's metadata that is true where its environment answers back."""

OWN_CONTEXT = "own_context"
"""Key of a sample's metadata that is true where it does not begin with its prompt, but with other tokens that the
policy was sent, such as those of a fork."""
ENDED_BY = "ended_by"
"""Key of a sample's metadata: the limit that ended an episode, where one did."""
STOPPED_AT = "stopped_at"
"""Key of a sample's metadata: the stop string of a request that ended its last turn, where the run does not know it."""
REWRITTEN_TURNS = "rewritten_turns"
"""Key of a sample's metadata: turns after which the chat template showed earlier ones otherwise."""


class RewrittenTurns(StrEnum):
    """Chooses how an episode goes on where the chat template shows earlier turns otherwise than they were said.

    Many templates leave out the thoughts of earlier turns when the user speaks again.
    """

    FORK = "fork"
    """The turns so far are a sample; those to come are another one, with the context that the template shows."""
    APPEND = "append"
    """What was said stays as it was, in one sample."""
    REFUSE = "refuse"
    """The rollout fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentStep:
    """The environment's answer to one turn of the policy.

    Raises:
        ValueError: If it neither says anything nor ends the episode, or does both.
    """

    state: Mapping[str, Any] = field(default_factory=dict)
    """JSON values from which the episode goes on, perhaps in another process."""
    messages: tuple[Message, ...] = ()
    """What the policy is told next."""
    verdict: Verdict | None = None
    """What the episode was worth; it ends."""

    def __post_init__(self) -> None:
        if bool(self.messages) is (self.verdict is not None):
            raise ValueError("a step of an environment has messages, or a verdict where the episode ends")


@runtime_checkable
class MultiTurnEnvironment(Environment, Protocol):
    """An environment whose problems take several turns. *Extension point* (registered by id).

    The policy is asked the question of the problem, and each of its turns is a step. All methods are pure: an episode
    that a killed process has begun is gone through again from what is stored of its turns.
    """

    def start(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state in which the policy is asked the question: JSON values."""

    def step(self, state: Mapping[str, Any], response: str) -> EnvironmentStep:
        """Answer a turn of the policy, given as the text of that turn."""

    def give_up(self, state: Mapping[str, Any]) -> Verdict:
        """Return what an episode is worth that ends at a limit of tokens."""


@runtime_checkable
class ServedEnvironment(Environment, Protocol):
    """An environment whose episodes go on in a server.

    Its methods are those of :class:`MultiTurnEnvironment`, but coroutines, and are awaited in the run's process. A
    state is no JSON: it has the connection to the server, which :meth:`close` ends.
    """

    async def start(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin an episode in the server, and return its state."""

    async def step(self, state: Mapping[str, Any], response: str) -> EnvironmentStep:
        """Answer a turn of the policy as the server does."""

    async def give_up(self, state: Mapping[str, Any]) -> Verdict:
        """Return what an episode is worth that ends at a limit of tokens."""

    async def close(self, state: Mapping[str, Any]) -> None:
        """Leave the server; the episode has ended, was cancelled or is begun anew later."""
