"""A request for an assistant's turn, whichever API it came through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import msgspec

from rollfeed.base.sglang_wire import CHARACTERS_OF_A_TOKEN
from rollfeed.chat_apis.api_error import ApiError
from rollfeed.types import Message, SamplingParams
from rollfeed.types.text import text_of

_LONGEST_HEADER = 1_000


class ToolChoice(StrEnum):
    """Whether calls of tools are wanted; that there are some cannot be promised."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A conversation and how it is to be gone on with. What is None is the server's to choose."""

    model: str
    """Empty where the body names none."""
    messages: tuple[Message, ...]
    """As chat templates take them: role (system, user, assistant, tool), content as one text, or where it has pictures
    as parts (``{"type": "image", "image": URL or data URI}`` until they are loaded), and where there are any
    ``tool_calls`` (``{"id", "type": "function", "function": {"name", "arguments"}}``, arguments as an object, or as a
    text that is none), ``tool_call_id``, ``name``, ``reasoning_content``. Nothing else."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Definitions, as chat templates take them."""
    custom_tools: frozenset[str] = frozenset()
    """Names of those whose one argument, ``input``, is a text of any form (custom tools of the responses API)."""
    namespaces: Mapping[str, str] = field(default_factory=dict)
    """By name of the tool, the namespace that a client knows it in (responses API)."""
    tool_choice: ToolChoice = ToolChoice.AUTO
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    further: Mapping[str, Any] = field(default_factory=dict)
    """Other sampling parameters, by SGLang's names, without those that change nothing."""
    num_choices: int = 1
    stream: bool = False
    include_usage: bool = False
    """Whether a stream of chat completions ends with token counts; the others always do."""
    with_logprobs: bool = False
    num_tops: int = 0
    """Of the likeliest tokens at each place, that are told beside the sampled one."""
    with_reasoning: bool = True
    """Whether thoughts are told; where they are not, they are no part of the turn that clients see."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    previous_response_id: str | None = None
    """The response that the messages go on from; they are all where it is None."""
    keeps_tools: bool = False
    """Whether the tools are those of that response."""
    left_out: tuple[str, ...] = ()
    """Asked for and not done: tools that no chat template can show, fields that mean nothing here."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the reply, which say what was left out."""
        shown = ascii(", ".join(self.left_out)[:_LONGEST_HEADER])[1:-1]
        return {"x-rollfeed-left-out": shown} if self.left_out else {}

    @property
    def callable_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools whose calls are read out of the answer."""
        return () if self.tool_choice is ToolChoice.NONE else self.tools

    def check_length(self, context_length: int) -> None:
        """Refuse what no context has room for, before it is rendered and tokenised. Raises ApiError for such."""
        size = sum(map(_size, self.messages)) + (len(msgspec.json.encode(self.tools)) if self.tools else 0)
        if size > CHARACTERS_OF_A_TOKEN * context_length:
            raise ApiError.too_long(size // CHARACTERS_OF_A_TOKEN, context_length)

    def sampling(self, default: SamplingParams) -> SamplingParams:
        """Return how it is sampled.

        Args:
            default: For what is not said. ``max_new_tokens`` is the most there can be.

        Raises:
            ApiError: If a parameter is none of :class:`SamplingParams`, or outside its range.
        """
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop or None,
            "seed": self.seed,
            "max_new_tokens": min(self.max_new_tokens or default.max_new_tokens, default.max_new_tokens),
            **self.further,
        }
        unknown = sorted(given.keys() - SamplingParams.__dataclass_fields__.keys())
        if unknown:
            raise ApiError(f"{unknown[0]} is not supported here: leave it out", param=unknown[0])
        try:
            return replace(default, **{name: value for name, value in given.items() if value is not None})
        except (ValueError, TypeError) as error:
            raise ApiError(str(error)) from error


def _size(message: Message) -> int:
    """Return about how many characters of a message a chat template may show."""
    calls = message.get("tool_calls")
    size = len(text_of(message.get("content"))) + len(message.get("reasoning_content") or "")
    return size + (len(msgspec.json.encode(calls)) if calls else 0)
