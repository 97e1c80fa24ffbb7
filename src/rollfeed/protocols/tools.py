"""Tools that a policy may call in an episode, and what a call gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class CallFormat(StrEnum):
    """The way in which a policy writes calls of tools."""

    AUTO = "auto"
    """As the model's chat template shows them; ``HERMES`` where it shows none."""
    HERMES = "hermes"
    """In ``<tool_call>`` tags: a JSON object with name and arguments, or XML as newer models of Qwen and GLM write it.
    """
    JSON = "json"
    """JSON objects with name and arguments (or ``parameters``), alone or in a list, in or behind a text."""
    TAGS = "tags"
    """In tags of the tool's name, with its only argument as it is, or all as a JSON object."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The result of a tool's call."""

    text: str
    images: tuple[str, ...] = ()
    """Pictures that it shows, as data URIs or URLs."""


@dataclass(frozen=True, slots=True)
class ToolFailure:
    """A call without a result: the policy is told why, and goes on."""

    text: str


class Tool(Protocol):
    """Answers calls of the policy. *Extension point* (``tools.use``).

    It is shared by all episodes. A tool with a method ``async def aclose()`` is closed when the run ends.
    """

    @property
    def name(self) -> str:
        """Letters, digits, ``_``, ``.`` and ``-``, unique in a run."""

    @property
    def description(self) -> str:
        """The text from which the policy knows what it does."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON Schema of an object: the arguments."""

    @property
    def is_idempotent(self) -> bool:
        """Whether calling it twice does no more than once: a call is made again where a kill has lost its answer."""

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """Return the answer: a text, or JSON values, which are told as JSON.

        Args:
            arguments: JSON values that fit ``parameters``.

        Raises:
            ToolError: With what the policy is told, where there is no answer; other errors are told by their kind.
        """


class Toolbox(Protocol):
    """The tools of a run, and the limits of its episodes."""

    @property
    def definitions(self) -> Sequence[Mapping[str, Any]]:
        """All tools, as chat templates take them; empty where there are none."""

    @property
    def call_format(self) -> CallFormat:
        """The way in which calls are written."""

    @property
    def max_turns(self) -> int:
        """Turns that are sampled in one episode, at most."""

    @property
    def max_seconds(self) -> float:
        """An episode that has taken longer is sampled no further turn."""

    def is_idempotent(self, name: str) -> bool:
        """Whether a tool's call may be made again."""

    def fitted(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any] | ToolFailure:
        """Return arguments as a tool takes them, or why the call cannot be made."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer | ToolFailure:
        """Make a call within its time limit, and return what it gave, cut to the limit of its length.

        Whatever a tool does becomes an answer or a failure.
        """
