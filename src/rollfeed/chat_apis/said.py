"""An assistant's turn as clients are told it: thoughts, text and calls, taken out of what was sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollfeed.chat_apis.asked import Asked
from rollfeed.conversations import Call, fit_arguments, names_in, read_turn
from rollfeed.protocols import CallFormat, Tokenizer
from rollfeed.types import Completion, FinishKind, Message
from rollfeed.types.text import held_back, well_formed, well_formed_json

_OPENING, _CLOSING = "<think>", "</think>"
_OPENED = re.compile(r"\s*<think>")
_CALL_TAGS = ("<tool_call>", "<function_call>", "<call>")
_BEFORE_JSON_CALLS = ("{", "[", "<", "\uff5c", "to=")
_OUR_ID = re.compile(r"call(\d+)")
_TAIL_TOKENS = 16
"""The tokens of a prompt in which the opening of a thought is looked for."""


class Finish(StrEnum):
    """The reasons for which a turn ends."""

    STOP = "stop"
    STOP_SEQUENCE = "stop_sequence"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


class TokenLogprob(NamedTuple):
    """A token that was sampled, or could have been."""

    token: str
    logprob: float
    tops: tuple[TokenLogprob, ...] = ()
    """The likeliest in its place."""


@dataclass(frozen=True, slots=True)
class SaidCall:
    """A call of a tool."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A finished turn: what clients see of it, the token counts, and why it ended."""

    content: str
    reasoning: str
    """Empty where there was no thought, or none is told."""
    calls: tuple[SaidCall, ...]
    finish: Finish
    stop_sequence: str | None
    """The text at which it stopped, for STOP_SEQUENCE; it is not in the content."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None
    """Of all sampled tokens, where they were asked for."""

    def message(self) -> Message:
        """Return the turn as a client that gives everything back will: equal to what :meth:`ChatApi.read` makes."""
        calls = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in self.calls
        ]
        return {
            "role": "assistant",
            "content": self.content,
            **({"reasoning_content": self.reasoning} if self.reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
        }


def said_of(
    completion: Completion,
    asked: Asked,
    tokenizer: Tokenizer,
    call_format: CallFormat,
    *,
    in_thought: bool,
    tops: Sequence[Sequence[tuple[int, float]]] = (),
    first_call: int = 0,
) -> Said:
    """Return the turn that was sampled.

    Where one call of it cannot be read, all of it is text. Calls inside of thoughts are not made.

    ``in_thought`` says whether the prompt ends with the opening of a thought (:func:`opens_thought`); ``first_call`` is
    the number of the first call, of which its id is made (:func:`next_call`).
    """
    reason = completion.finish_reason
    tools = names_in(asked.callable_tools)
    text = _text(completion, tokenizer, skip_special_tokens=not tools)
    stop = reason.matched if isinstance(reason.matched, str) else None
    reasoning, begin = _thought(text, in_thought=in_thought)
    content = text[begin:]
    calls: tuple[SaidCall, ...] = ()
    if tools:
        turn = read_turn(text[begin:], call_format, tools=tools)
        read = [call for call in turn.calls if isinstance(call, Call)]
        if len(read) == len(turn.calls) > 0 and (call_format is not CallFormat.JSON or _are_known(read, tools)):
            content = turn.text
            calls = tuple(
                SaidCall(
                    f"call{first_call + number:05d}",
                    well_formed(call.name),
                    well_formed_json(_arguments(call, asked, tools)),
                )
                for number, call in enumerate(read)
            )
        else:
            shown = _text(completion, tokenizer, skip_special_tokens=True)
            reasoning, begin = _thought(shown, in_thought=in_thought)
            content = shown[begin:]
    finish = Finish(reason.kind.value)
    if reason.kind is FinishKind.STOP:
        finish = Finish.TOOL_CALLS if calls else Finish.STOP if stop is None else Finish.STOP_SEQUENCE
    logprobs = None
    if asked.with_logprobs:
        logprobs = token_logprobs(completion.token_ids, completion.logprobs, tokenizer, tops)
    return Said(
        content=content,
        reasoning=reasoning.strip() if asked.with_reasoning else "",
        calls=calls,
        finish=finish,
        stop_sequence=stop if finish is Finish.STOP_SEQUENCE else None,
        prompt_tokens=completion.prompt_tokens,
        cached_tokens=completion.cached_tokens,
        completion_tokens=len(completion.token_ids),
        logprobs=logprobs,
    )


def call_openings(asked: Asked, call_format: CallFormat) -> tuple[str, ...]:
    """Return the texts with which a call may begin; none where there are no tools."""
    if not asked.callable_tools:
        return ()
    if call_format is CallFormat.JSON:
        return _BEFORE_JSON_CALLS
    own = [f"<{name}>" for name in names_in(asked.callable_tools)] if call_format is CallFormat.TAGS else []
    return (*_CALL_TAGS, *own)


def said_so_far(text: str, openings: Sequence[str], *, in_thought: bool) -> tuple[str, str]:
    """Return thought and content of the beginning of a turn, as far as nothing that follows can change them.

    ``openings`` are the texts with which a call may begin; ``in_thought`` says whether the prompt ends with the opening
    of a thought.
    """
    opened = _OPENED.match(text)
    if not opened and _OPENING.startswith(text.strip()):
        return "", ""
    reasoning, begin = _thought(text, in_thought=in_thought)
    if (in_thought or opened) and _CLOSING not in text:
        return reasoning[: len(reasoning) - held_back(reasoning, _CLOSING)].strip(), ""
    content = text[begin:]
    if openings:
        places = [place for opening in openings if (place := content.find(opening)) >= 0]
        held = max(held_back(content, opening) for opening in openings)
        content = content[: min([len(content) - held, *places])].rstrip()
    return reasoning.strip(), content


def opens_thought(prompt_ids: Sequence[int] | NDArray[np.int32], tokenizer: Tokenizer) -> bool:
    """Tell whether a prompt ends with the opening of a thought, as templates of reasoning models have it."""
    tail = tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    return tail.rstrip().endswith(_OPENING)


def next_call(messages: Iterable[Message]) -> int:
    """Return the number of a conversation's next call: no earlier one of it has an id made of that or of a later."""
    ids = (str(call.get("id")) for message in messages for call in message.get("tool_calls") or ())
    return max((int(match[1][:9]) + 1 for each in ids if (match := _OUR_ID.fullmatch(each))), default=0)


def token_logprobs(
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    tokenizer: Tokenizer,
    tops: Sequence[Sequence[tuple[int, float]]] = (),
) -> tuple[TokenLogprob, ...]:
    """Return tokens as texts with their log-probabilities, and the likeliest of each place, where they are given."""

    def told(token_id: int, logprob: float, likeliest: Sequence[tuple[int, float]]) -> TokenLogprob:
        shown = tuple(told(*each, ()) for each in likeliest)
        return TokenLogprob(tokenizer.decode([token_id], skip_special_tokens=False), logprob, shown)

    return tuple(map(told, token_ids.tolist(), logprobs.tolist(), tops or repeat(())))


def _text(completion: Completion, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> str:
    """Return the text of a turn, without the token or text that ended it."""
    ids, reason = completion.token_ids, completion.finish_reason
    ends = reason.kind is FinishKind.STOP and isinstance(reason.matched, int) and len(ids) and ids[-1] == reason.matched
    has_end = ends or (len(ids) and int(ids[-1]) in tokenizer.eos_token_ids)
    text = tokenizer.decode(ids[:-1] if has_end else ids, skip_special_tokens=skip_special_tokens)
    place = text.rfind(reason.matched) if reason.kind is FinishKind.STOP and isinstance(reason.matched, str) else -1
    return text if place < 0 else text[:place]


def _thought(text: str, *, in_thought: bool) -> tuple[str, int]:
    """Return the thought with which a turn begins, and where the rest does."""
    opened = _OPENED.match(text)
    if not (in_thought or opened):
        return "", 0
    begin = opened.end() if opened else 0
    end = text.find(_CLOSING, begin)
    if end < 0:
        return text[begin:], len(text)
    rest = text[end + len(_CLOSING) :]
    return text[begin:end], len(text) - len(rest.lstrip())


def _are_known(calls: Sequence[Call], tools: Mapping[str, Any]) -> bool:
    """Tell whether all calls are of tools that there are: other JSON is an answer."""
    return all(call.name in tools for call in calls)


def _arguments(call: Call, asked: Asked, tools: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the arguments as the tool takes them, where they can be made so."""
    if call.name in asked.custom_tools:
        only = next(iter(call.arguments.values())) if len(call.arguments) == 1 else None
        text = only if isinstance(only, str) else json.dumps(call.arguments, ensure_ascii=False)
        return {"input": call.arguments["input"] if isinstance(call.arguments.get("input"), str) else text}
    try:
        fitted = fit_arguments(tools.get(call.name) or {}, call.arguments)
    except (AttributeError, TypeError, ValueError):  # the schema is none
        return call.arguments
    return call.arguments if isinstance(fitted, str) else fitted
