"""The calls of an episode: read from what was sampled, made together, and answered in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.conversations import Call, SaidTurn, call_syntax, names_in, read_turn
from rollfeed.errors import RunFailedError
from rollfeed.generate.episode import Episode, ToolCall
from rollfeed.protocols import Services, Tokenizer, ToolAnswer, Toolbox, ToolFailure
from rollfeed.types import Message, Prompt

NUM_CALLS, NUM_FAILED_CALLS = "num_tool_calls", "num_failed_tool_calls"
"""Keys of a sample's metadata."""
_ROUNDS = 3
"""In which special tokens are looked for: without one it may be seen that another was written around it."""
_UNSURE = {
    "failure": "the process ended while this call was under way: it is not known whether it was made, nor what it gave"
}


def may_call(prompt: Prompt, services: Services) -> bool:
    """Whether a prompt is answered with tools."""
    return bool(prompt.tools and services.tools is not None and services.tools.definitions)


class Calling:
    """Makes the calls of one episode, each at most once, whatever ends the process."""

    def __init__(self, prompt: Prompt, services: Services, episode: Episode) -> None:
        if services.tools is None:
            raise RunFailedError("services.tools is not there: this run was made without tools")
        self._box: Toolbox = services.tools
        self._tokenizer = services.tokenizer
        self._episode = episode
        self._syntax = call_syntax(services.tokenizer, self._box.call_format, is_chat=prompt.messages is not None)
        known = names_in(self._box.definitions)
        self._tools = {name: known[name] for name in names_in(prompt.tools or ()) if name in known}
        self._first_id = 0
        self.num_calls = 0
        """Made or not."""
        self.num_failed = 0
        """Those that could not be made, or gave no answer."""

    def read(self, said: NDArray[np.int32]) -> SaidTurn:
        """Take a sampled turn ``(T,)`` apart."""
        ids = said[:-1] if len(said) and int(said[-1]) in self._tokenizer.eos_token_ids else said
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return read_turn(text, self._syntax.call_format, tools=self._tools)

    async def answer(self, turn: SaidTurn) -> tuple[list[Message], list[Message]]:
        """Make the calls of a turn, all at once, and return what the policy is told, and the forms of the turn."""
        outcomes: dict[int, ToolAnswer | ToolFailure] = {}
        to_be_made: dict[int, ToolCall] = {}
        for number, call in enumerate(turn.calls):
            fitted = self._fitted(call) if isinstance(call, Call) else ToolFailure(call.problem)
            if isinstance(call, Call) and not isinstance(fitted, ToolFailure):
                to_be_made[number] = ToolCall(
                    call.name,
                    fitted,
                    partial(self._make, call.name, fitted),
                    if_lost=_UNSURE,
                    is_idempotent=self._box.is_idempotent(call.name),
                )
            elif isinstance(fitted, ToolFailure):
                outcomes[number] = fitted
        given = await self._episode.call_together(list(to_be_made.values()))
        outcomes |= {number: _outcome(each) for number, each in zip(to_be_made, given, strict=True)}
        self.num_calls += len(outcomes)
        self.num_failed += sum(isinstance(outcome, ToolFailure) for outcome in outcomes.values())
        told = [without_marks(_told(outcomes[number]), self._tokenizer) for number in range(len(turn.calls))]
        first_id, self._first_id = self._first_id, self._first_id + len(turn.calls)
        messages = self._syntax.results(turn, told, first_id=first_id)
        shown = [each.images if isinstance(each, ToolAnswer) else () for each in map(outcomes.get, range(len(told)))]
        return _with_pictures(messages, shown), turn.forms(first_id=first_id)

    def _fitted(self, call: Call) -> Mapping[str, Any] | ToolFailure:
        if call.name not in self._tools:
            names = ", ".join(self._tools) or "none"
            return ToolFailure(f"there is no tool {call.name!r:.80}; there is {names}")
        return self._box.fitted(call.name, call.arguments)

    async def _make(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        outcome = await self._box.call(name, arguments)
        if isinstance(outcome, ToolFailure):
            return {"failure": outcome.text}
        return {"answer": outcome.text, **({"images": list(outcome.images)} if outcome.images else {})}


def _with_pictures(messages: list[Message], shown: Sequence[Sequence[str]]) -> list[Message]:
    """Return what the policy is told with the pictures of each call, or of all in the one message."""
    if len(messages) != len(shown):
        shown = [[each for images in shown for each in images]]
    return [_showing(message, images) if images else message for message, images in zip(messages, shown, strict=True)]


def _showing(message: Message, images: Sequence[str]) -> Message:
    parts = [{"type": "image", "image": image} for image in images]
    return {**message, "content": [{"type": "text", "text": message["content"]}, *parts]}


def _outcome(given: Mapping[str, Any]) -> ToolAnswer | ToolFailure:
    if "failure" in given:
        return ToolFailure(given["failure"])
    return ToolAnswer(given["answer"], tuple(given.get("images", ())))


def _told(outcome: ToolAnswer | ToolFailure) -> str:
    return f"error: {outcome.text}" if isinstance(outcome, ToolFailure) else outcome.text


def without_marks(text: str, tokenizer: Tokenizer) -> str:
    """Return a text in which no special token is written, as ``<|im_start|>``: what a tool gives opens no turn.

    Where there is one, a space follows its first character.
    """
    for _ in range(_ROUNDS):
        ids = tokenizer.encode(text, add_special_tokens=False)
        shown, whole = (tokenizer.decode(ids, skip_special_tokens=skips) for skips in (True, False))
        if shown == whole:
            return text
        for token_id in np.unique(ids).tolist():
            if not tokenizer.decode([token_id], skip_special_tokens=True):
                mark = tokenizer.decode([token_id], skip_special_tokens=False)
                text = text.replace(mark, f"{mark[0]} {mark[1:]}" if len(mark) > 1 else "") if mark else text
    return shown
