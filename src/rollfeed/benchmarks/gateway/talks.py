"""An agent's side of each API, without a client library: what is sent, and what a reply adds to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

TOOL = "read_part"
_PARAMETERS = {
    "type": "object",
    "properties": {"number": {"type": "integer"}, "why": {"type": "string"}},
    "required": ["number"],
}
_ABOUT = "Returns a part of the file."
_MAX_TOKENS = 4096


class Api(StrEnum):
    """A form of requests, by the path that takes it."""

    CHAT = "chat/completions"
    RESPONSES = "responses"
    MESSAGES = "messages"


class Talk(ABC):
    """One conversation: a history in the form of an API, which grows by replies and answers of the tool."""

    path: Api

    def __init__(self, system: str, question: str) -> None:
        self._system = system
        self.history: list[Any] = [{"role": "user", "content": question}]

    @abstractmethod
    def body(self, *, stream: bool) -> dict[str, Any]:
        """Return what is posted next."""

    @abstractmethod
    def take(self, reply: Mapping[str, Any], answer: Callable[[Any], str]) -> None:
        """Add a reply and what its calls are answered; which is made of their arguments."""

    @abstractmethod
    def whole(self, events: Iterator[Any]) -> Mapping[str, Any]:
        """Return the reply that a stream of events comes to."""

    def read(self, content: bytes, *, stream: bool) -> Mapping[str, Any]:
        """Return the reply of a response's body."""
        reply: Mapping[str, Any] = self.whole(_events(content)) if stream else msgspec.json.decode(content)
        return reply


class _Chat(Talk):
    path = Api.CHAT

    def __init__(self, system: str, question: str) -> None:
        super().__init__(system, question)
        self.history.insert(0, {"role": "system", "content": system})

    def body(self, *, stream: bool) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": TOOL, "description": _ABOUT, "parameters": _PARAMETERS}}
        about = {"stream_options": {"include_usage": True}} if stream else {}
        return {"model": "policy", "messages": self.history, "tools": [tool], "stream": stream, **about}

    def take(self, reply: Mapping[str, Any], answer: Callable[[Any], str]) -> None:
        message = reply["choices"][0]["message"]
        self.history.append(message)
        self.history += [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": answer(msgspec.json.decode(call["function"]["arguments"])),
            }
            for call in message.get("tool_calls") or ()
        ]

    def whole(self, events: Iterator[Any]) -> Mapping[str, Any]:
        content, calls = "", dict[int, Any]()
        for event in events:
            for choice in event["choices"]:
                delta = choice["delta"]
                content += delta.get("content") or ""
                for part in delta.get("tool_calls") or ():
                    if part["index"] not in calls:
                        calls[part["index"]] = {"id": part["id"], "type": "function", "function": part["function"]}
                    else:
                        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        message = {"role": "assistant", "content": content or None, "tool_calls": list(calls.values())}
        return {"choices": [{"message": message}]}


class _Responses(Talk):
    path = Api.RESPONSES

    def body(self, *, stream: bool) -> dict[str, Any]:
        tool = {"type": "function", "name": TOOL, "description": _ABOUT, "parameters": _PARAMETERS, "strict": False}
        asked = {"model": "policy", "instructions": self._system, "input": self.history, "store": False}
        return {**asked, "tools": [tool], "stream": stream}

    def take(self, reply: Mapping[str, Any], answer: Callable[[Any], str]) -> None:
        self.history += reply["output"]
        self.history += [
            {
                "type": "function_call_output",
                "call_id": item["call_id"],
                "output": answer(msgspec.json.decode(item["arguments"])),
            }
            for item in reply["output"]
            if item["type"] == "function_call"
        ]

    def whole(self, events: Iterator[Any]) -> Mapping[str, Any]:
        completed: Mapping[str, Any] = next(each["response"] for each in events if each["type"] == "response.completed")
        return completed


class _Messages(Talk):
    path = Api.MESSAGES

    def body(self, *, stream: bool) -> dict[str, Any]:
        tool = {"name": TOOL, "description": _ABOUT, "input_schema": _PARAMETERS}
        asked = {"model": "policy", "max_tokens": _MAX_TOKENS, "system": self._system, "messages": self.history}
        return {**asked, "tools": [tool], "stream": stream}

    def take(self, reply: Mapping[str, Any], answer: Callable[[Any], str]) -> None:
        self.history.append({"role": "assistant", "content": reply["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": answer(block["input"])}
            for block in reply["content"]
            if block["type"] == "tool_use"
        ]
        self.history.append({"role": "user", "content": results or "Go on."})

    def whole(self, events: Iterator[Any]) -> Mapping[str, Any]:
        blocks: list[dict[str, Any]] = []
        texts: list[str] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
                texts.append("")
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                texts[event["index"]] += delta.get("text") or delta.get("partial_json") or ""
        for block, text in zip(blocks, texts, strict=True):
            block |= {"input": msgspec.json.decode(text or "{}")} if block["type"] == "tool_use" else {"text": text}
        return {"content": blocks}


def begin_talk(api: Api, system: str, question: str) -> Talk:
    """Return a new conversation."""
    kinds: Sequence[type[Talk]] = (_Chat, _Responses, _Messages)
    return next(kind for kind in kinds if kind.path is api)(system, question)


def _events(content: bytes) -> Iterator[Any]:
    for line in content.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield msgspec.json.decode(line[6:])
