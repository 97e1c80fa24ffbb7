"""Finds out how a model calls tools, and is told of them and their answers, by trying its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, overload

from rollfeed.conversations.picture_places import joined_contents
from rollfeed.conversations.written_calls import Call, SaidTurn, call_id, read_turn
from rollfeed.errors import ConfigError
from rollfeed.protocols import CallFormat, Tokenizer
from rollfeed.types import Message
from rollfeed.types.text import text_of

_MARK, _ANSWER = "rollfeedmark", "rollfeedanswer"
_DEFINITION = {
    "type": "function",
    "function": {
        "name": _MARK,
        "description": _MARK,
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
_QUESTION: Message = {"role": "user", "content": "?"}
_CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": call_id(0), "type": "function", "function": {"name": _MARK, "arguments": {"text": "a b"}}}],
}
_CALLED_TWICE: Message = {**_CALLED, "tool_calls": [{**_CALLED["tool_calls"][0], "id": call_id(n)} for n in range(2)]}
_RESULT: Message = {"role": "tool", "name": _MARK, "tool_call_id": call_id(0), "content": _ANSWER}

_HOW = {
    CallFormat.HERMES: 'To use one, write\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>',
    CallFormat.JSON: 'To use one, write a JSON object {"name": NAME, "arguments": OBJECT} and nothing else',
    CallFormat.TAGS: "To use one, write its arguments as a JSON object, or its only argument as it is, in tags of its "
    "name: <NAME>ARGUMENTS</NAME>",
}


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The way in which calls are written, and what must be said because the chat template does not."""

    call_format: CallFormat
    """Not ``AUTO``."""
    shows_tools: bool
    """Whether definitions of tools are shown to the policy by the template."""
    shown_calls: int
    """Calls of an earlier turn that are shown by it, at most: 0, 1, or 2 for any number."""
    results_follow_text: bool
    """Whether messages of the role tool may follow a turn of text."""
    results_follow_calls: bool
    """Whether they may follow a turn that is a message with calls."""
    is_chat: bool
    """Whether there are messages at all, and not one text."""

    def introduce(self, definitions: Sequence[Mapping[str, Any]]) -> str:
        """Return what the policy is told of tools that the template does not show."""
        lines = [json.dumps(each.get("function", each), ensure_ascii=False) for each in definitions]
        how = f"{_HOW[self.call_format]}. You are told the answer before you go on."
        return "\n".join(["You can use these tools:", *lines, how, "", ""])

    @overload
    def introduced(self, content: str, definitions: Sequence[Mapping[str, Any]]) -> str: ...

    @overload
    def introduced(self, content: Sequence[Message], definitions: Sequence[Mapping[str, Any]]) -> Sequence[Message]: ...

    def introduced(
        self, content: str | Sequence[Message], definitions: Sequence[Mapping[str, Any]]
    ) -> str | Sequence[Message]:
        """Return a conversation with the tools at the beginning of its first message where the template shows none."""
        if self.shows_tools or not definitions:
            return content
        introduction = self.introduce(definitions)
        if isinstance(content, str):
            return introduction + content
        first, *others = content
        said = first.get("content")
        if isinstance(said, list | tuple):
            return [{**first, "content": [{"type": "text", "text": introduction}, *said]}, *others]
        return [{**first, "content": f"{introduction}{said or ''}"}, *others]

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in the roles that the template takes: calls and results that it does not show become text."""
        told: list[Message] = []
        takes_results = self.results_follow_text
        for message in messages:
            num_calls = len(message.get("tool_calls") or ())
            is_shown = min(num_calls, 2) <= self.shown_calls
            if message["role"] == "assistant":
                takes_results = self.results_follow_calls if num_calls and is_shown else self.results_follow_text
            if not is_shown:
                calls = [self._written(call["function"]) for call in message["tool_calls"]]
                others = {name: value for name, value in message.items() if name != "tool_calls"}
                told.append({**others, "content": "\n".join([text for text in (message["content"],) if text] + calls)})
            elif message["role"] == "tool" and not takes_results:
                before = ""
                if told and told[-1]["role"] == "user" and text_of(told[-1]["content"]).endswith("</tool_response>"):
                    before = told.pop()["content"]
                opening = "\n<tool_response>\n" if before else "<tool_response>\n"
                shown = joined_contents(before, opening, message["content"], "\n</tool_response>")
                told.append({"role": "user", "content": shown})
            else:
                told.append(message)
        return told

    def _written(self, function: Mapping[str, Any]) -> str:
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        if self.call_format is CallFormat.TAGS:
            return f"<{function['name']}>{arguments}</{function['name']}>"
        call = f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'
        return call if self.call_format is CallFormat.JSON else f"<tool_call>\n{call}\n</tool_call>"

    def results(self, turn: SaidTurn, answers: Sequence[str], *, first_id: int = 0) -> list[Message]:
        """Return what the policy is told after its calls, an answer for each in their order."""
        if self.results_follow_text or (self.results_follow_calls and turn.forms()):
            return [
                {
                    "role": "tool",
                    **({"name": call.name} if isinstance(call, Call) else {}),
                    "tool_call_id": call_id(first_id + number),
                    "content": answer,
                }
                for number, (call, answer) in enumerate(zip(turn.calls, answers, strict=True))
            ]
        shown = "\n".join(f"<tool_response>\n{answer}\n</tool_response>" for answer in answers)
        return [{"role": "user", "content": shown if self.is_chat else f"\n{shown}\n"}]


def call_syntax(tokenizer: Tokenizer, call_format: CallFormat, *, is_chat: bool = True) -> CallSyntax:
    """Find out how a model calls tools. ``is_chat`` tells whether prompts are rendered through the template."""
    return _syntax(tokenizer, call_format, is_chat)  # type: ignore[arg-type]


@lru_cache(maxsize=16)
def _syntax(tokenizer: Tokenizer, call_format: CallFormat, is_chat: bool) -> CallSyntax:
    if not (is_chat and tokenizer.has_chat_template):
        chosen = CallFormat.HERMES if call_format is CallFormat.AUTO else call_format
        return CallSyntax(
            chosen,
            shows_tools=False,
            shown_calls=0,
            results_follow_text=False,
            results_follow_calls=False,
            is_chat=False,
        )
    if call_format is CallFormat.AUTO:
        call_format = _shown_format(tokenizer)
    text_turn: Message = {"role": "assistant", "content": "a"}
    return CallSyntax(
        call_format,
        shows_tools=_MARK in _rendered(tokenizer, [_QUESTION], tools=[_DEFINITION]),
        shown_calls=_num_shown_calls(tokenizer),
        results_follow_text=_ANSWER in _rendered(tokenizer, [_QUESTION, text_turn, _RESULT]),
        results_follow_calls=_ANSWER in _rendered(tokenizer, [_QUESTION, _CALLED, _RESULT]),
        is_chat=True,
    )


def _num_shown_calls(tokenizer: Tokenizer) -> int:
    """Return 0 where the template shows no call, 1 where it takes one a turn, else 2."""
    silent: Message = {"role": "assistant", "content": ""}
    without, once, twice = (_rendered(tokenizer, [_QUESTION, turn]) for turn in (silent, _CALLED, _CALLED_TWICE))
    if not once or once == without:
        return 0
    return 2 if twice else 1


def _shown_format(tokenizer: Tokenizer) -> CallFormat:
    """Return the format whose reader finds a call where the template shows one."""
    asked = _rendered(tokenizer, [_QUESTION])
    shown = _rendered(tokenizer, [_QUESTION, _CALLED])
    pairs = enumerate(zip(asked, shown, strict=False))
    behind = shown[next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(asked), len(shown))) :]
    tools = {_MARK: _DEFINITION["function"]["parameters"]}  # type: ignore[index]
    for call_format in (CallFormat.HERMES, CallFormat.JSON, CallFormat.TAGS):
        if Call(_MARK, {"text": "a b"}) in read_turn(behind, call_format, tools=tools).calls:
            return call_format
    return CallFormat.HERMES


def _rendered(
    tokenizer: Tokenizer, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    try:
        return tokenizer.render_chat(messages, tools=tools, add_generation_prompt=False)
    except ConfigError:
        return ""
