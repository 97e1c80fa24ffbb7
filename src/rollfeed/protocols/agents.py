"""Agents that speak to an API, and when a turn in what they send is one that was sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from rollfeed.types import Message


class Matching(StrEnum):
    """Chooses when a turn in a history is one that was sampled, and a message one that was told before."""

    LENIENT = "lenient"
    """Also where a harness has changed white space around texts, contents that are empty or in parts, ids of calls, the
    order of arguments, or has left thoughts out."""
    STRICT = "strict"
    """Where all of it is as it was returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """A question for an agent, and the way to the policy."""

    text: str
    """The question, as the prompt has it; of messages, the last one."""
    messages: tuple[Message, ...]
    """The question as messages; pictures are parts ``image_url`` with data URIs."""
    openai_base_url: str
    """For clients of OpenAI's APIs."""
    anthropic_base_url: str
    """For clients of Anthropic's."""
    api_key: str = field(repr=False)
    """For both."""
    model: str
    """The policy's name."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What ``agent.metadata_keys`` names of the prompt's."""


class AgentFn(Protocol):
    """Does one task with the policy's help, through a client of OpenAI's or Anthropic's API. *Extension point*.

    It may be async; one that is not is called in a thread of its own.
    """

    def __call__(self, task: AgentTask) -> object:
        """Do it; the last answer of the policy is what is graded, and nothing that is returned."""
