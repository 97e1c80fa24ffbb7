"""Anthropic's messages, and the count of their tokens."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rollfeed.chat_apis.api_error import ApiError, ErrorKind
from rollfeed.chat_apis.asked import Asked, ToolChoice
from rollfeed.chat_apis.chat_api import ReplyEvents, event, pieces
from rollfeed.chat_apis.reading import (
    Fields,
    content_of,
    content_of_parts,
    part_or_picture,
    part_text,
    read_sampling,
    read_tool_choice,
    system_first,
    text_of_parts,
    tool_call,
    tool_definition,
)
from rollfeed.chat_apis.said import Finish, Said, TokenLogprob
from rollfeed.types.text import text_of

_HARMLESS = frozenset(
    {
        *("metadata", "service_tier", "cache_control", "diagnostics", "inference_geo", "speed", "betas", "rid"),
        *("user_profile_id", "workspace_id"),
    }
)
_REFUSED: Mapping[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],), "fallbacks": ([],)}
_CHOICES = {"auto": ToolChoice.AUTO, "any": ToolChoice.REQUIRED, "none": ToolChoice.NONE}
_STATUS = {
    ErrorKind.INVALID_REQUEST: (400, "invalid_request_error"),
    ErrorKind.AUTHENTICATION: (401, "authentication_error"),
    ErrorKind.PERMISSION: (403, "permission_error"),
    ErrorKind.NOT_FOUND: (404, "not_found_error"),
    ErrorKind.TOO_LARGE: (413, "request_too_large"),
    ErrorKind.RATE_LIMIT: (429, "rate_limit_error"),
    ErrorKind.OVERLOADED: (529, "overloaded_error"),
    ErrorKind.API_ERROR: (500, "api_error"),
}
_STOP_REASONS = {
    Finish.STOP: "end_turn",
    Finish.STOP_SEQUENCE: "stop_sequence",
    Finish.LENGTH: "max_tokens",
    Finish.TOOL_CALLS: "tool_use",
    Finish.ABORT: "pause_turn",
}
_SIGNATURE = "unsigned"
"""Of thoughts: clients give back none without, and nothing is signed here."""


class AnthropicMessages:
    """``/v1/messages``."""

    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"

    def read(self, body: Any) -> Asked:
        return self._read(Fields(body), is_answered=True)

    def read_count(self, body: Any) -> Asked:
        """Return the request whose tokens are to be counted. Raises ApiError if it is none."""
        return self._read(Fields(body), is_answered=False)

    def count(self, prompt_tokens: int) -> dict[str, Any]:
        """Return the body of the reply to a question for the number of tokens."""
        return {"input_tokens": prompt_tokens}

    def _read(self, fields: Fields, *, is_answered: bool) -> Asked:
        fields.refuse(_REFUSED)
        system = text_of_parts(fields.take("system"), "system", between="\n")
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        for index, each in enumerate(fields.objects("messages")):
            messages += _messages(each, f"messages[{index}]")
        if len(messages) == 1:
            raise ApiError("messages must be a list of at least one message", param="messages")
        if messages[-1]["role"] == "assistant" and is_answered:
            raise ApiError(
                "the last message is the assistant's: answers that have begun are not gone on with here",
                param="messages",
            )
        tools, left_out = _tools(fields.objects("tools"))
        choice = read_tool_choice(_tool_choice(fields.object("tool_choice"), left_out), tools, left_out)
        max_tokens = fields.integer("max_tokens", least=1)
        if max_tokens is None and is_answered:
            raise ApiError("max_tokens is missing", param="max_tokens")
        if Fields(fields.object("output_config")).take("format") is not None:
            raise ApiError("output_config.format is not supported here: leave it out", param="output_config.format")
        thinking = fields.object("thinking").get("type")
        thread = Fields(fields.object("thread"))
        previous = thread.text("previous_message_id") if thread.take("type") == "continue" else None
        asked = read_sampling(fields, stop="stop_sequences")
        left_out += fields.rest(_HARMLESS)
        return Asked(
            messages=tuple(system_first(messages)),
            tools=tuple(tools),
            tool_choice=choice,
            max_new_tokens=max_tokens,
            with_reasoning=thinking in ("enabled", "adaptive"),
            previous_response_id=previous,
            keeps_tools=previous is not None,
            left_out=tuple(left_out),
            **asked,
        )

    def new_id(self) -> str:
        return f"msg_{secrets.token_hex(12)}"

    def reply(self, asked: Asked, said: Sequence[Said], *, reply_id: str, created: int) -> dict[str, Any]:
        del created
        (turn,) = said
        content: list[dict[str, Any]] = []
        if turn.reasoning:
            content.append({"type": "thinking", "thinking": turn.reasoning, "signature": _SIGNATURE})
        if turn.content or not turn.calls:
            content.append({"type": "text", "text": turn.content})
        content += [
            {"type": "tool_use", "id": call.call_id, "name": call.name, "input": call.arguments} for call in turn.calls
        ]
        return {**_message(asked, reply_id), "content": content, **_end(turn), "usage": _usage(turn)}

    def events(self, asked: Asked, *, reply_id: str, created: int) -> ReplyEvents:
        del created
        return _MessageEvents(asked, reply_id=reply_id)

    def error(self, error: ApiError) -> tuple[int, dict[str, Any]]:
        status, kind = _STATUS[error.kind]
        message = error.message if error.param is None else f"{error.param}: {error.message}"
        # Where it is known by this, clients send the whole history, as a new thread.
        details = {"details": {"error_code": "thread_not_found"}} if error.param == "previous_response_id" else {}
        return status, {"type": "error", "error": {"type": kind, "message": message, **details}}


class _MessageEvents:
    def __init__(self, asked: Asked, *, reply_id: str) -> None:
        self._asked = asked
        self._reply_id = reply_id
        self._num_blocks = 0
        self._open = ""
        self._told = {"thinking": 0, "text": 0}
        """Characters that have been told."""

    def opening(self, *, prompt_tokens: int = 0) -> bytes:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        message = {**_message(self._asked, self._reply_id), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**message, "usage": usage}) + self.ping()

    def ping(self) -> bytes:
        return _event("ping")

    def progress(self, choice: int, reasoning: str, content: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        del choice, logprobs
        told = self._more("thinking", reasoning) if self._asked.with_reasoning else b""
        return told + self._more("text", content)

    def finished(self, choice: int, said: Said) -> bytes:
        told = self.progress(choice, said.reasoning, said.content)
        if not (self._num_blocks or said.calls):
            told += self._begin("text", {"type": "text", "text": ""})
        told += self._end()
        for call in said.calls:
            told += self._begin("tool_use", {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}})
            for piece in pieces(call.arguments_text):
                told += self._delta({"type": "input_json_delta", "partial_json": piece})
            told += self._end()
        return told

    def ending(self, said: Sequence[Said]) -> bytes:
        return _event("message_delta", delta=_end(said[0]), usage=_usage(said[0])) + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return event(AnthropicMessages().error(error)[1], name="error")

    def _more(self, kind: str, text: str) -> bytes:
        told = b""
        for piece in pieces(text, self._told[kind]):
            if self._open != kind:
                signed = {"signature": ""} if kind == "thinking" else {}
                told += self._end() + self._begin(kind, {"type": kind, kind: "", **signed})
            told += self._delta({"type": f"{kind}_delta", kind: piece})
        self._told[kind] = max(self._told[kind], len(text))
        return told

    def _begin(self, kind: str, block: Mapping[str, Any]) -> bytes:
        self._open = kind
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _end(self) -> bytes:
        kind, self._open = self._open, ""
        if not kind:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": _SIGNATURE}) if kind == "thinking" else b""
        return signed + _event("content_block_stop", index=self._num_blocks - 1)


def _event(kind: str, **content: Any) -> bytes:
    return event({"type": kind, **content}, name=kind)


def _message(asked: Asked, reply_id: str) -> dict[str, Any]:
    return {"id": reply_id, "type": "message", "role": "assistant", "model": asked.model}


def _end(said: Said) -> dict[str, Any]:
    return {"stop_reason": _STOP_REASONS[said.finish], "stop_sequence": said.stop_sequence}


def _usage(said: Said) -> dict[str, Any]:
    return {
        "input_tokens": said.prompt_tokens - said.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": said.cached_tokens,
        "output_tokens": said.completion_tokens,
    }


def _tools(given: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tools that a template can show, and what is left out."""
    tools, left_out = [], []
    for index, tool in enumerate(given):
        if tool.get("type") in (None, "custom"):
            tools.append(tool_definition(tool, f"tools[{index}]", parameters="input_schema"))
        else:
            left_out.append(f"tools[{index}] ({tool['type']!s:.40})")
    return tools, left_out


def _tool_choice(given: Mapping[str, Any], left_out: list[str]) -> Any:
    """Return the choice as OpenAI's APIs have it."""
    if given.get("disable_parallel_tool_use") is True:
        left_out.append("tool_choice.disable_parallel_tool_use")
    if given.get("type") == "tool":
        return {"name": given.get("name")}
    return _CHOICES.get(str(given["type"]), given["type"]) if "type" in given else None


def _messages(given: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return what one message is for a template: the results of tools are messages of their own."""
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError("must be user or assistant", param=f"{where}.role")
    if content is None:
        raise ApiError("is missing", param=f"{where}.content")
    if isinstance(content, str) or role == "system":
        return [{"role": role, "content": text_of_parts(content, f"{where}.content", between="\n")}]
    return (_said if role == "assistant" else _asked)(Fields(given).objects("content"), f"{where}.content")


def _asked(blocks: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    pieces: list[str | dict[str, Any]] = []
    """Of the user's message that is under way."""
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.get("type") == "tool_result":
            messages += _as_users(pieces)
            messages.append(_tool_result(block, at))
            pieces = []
        else:
            pieces.append(part_or_picture(block, at))
    messages += _as_users(pieces)
    return messages or [{"role": "user", "content": ""}]


def _as_users(pieces: Sequence[str | dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content_of(pieces, between="\n")}] if pieces else []


def _tool_result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = content_of_parts(block.get("content"), f"{where}.content", between="\n")
    text = text_of(content)
    if block.get("is_error") is True and not text.lower().startswith(("error", "<tool_use_error")):
        content = f"Error: {text}" if isinstance(content, str) else [{"type": "text", "text": "Error: "}, *content]
    return {"role": "tool", "content": content, "tool_call_id": str(block.get("tool_use_id") or "")}


def _said(blocks: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.get("type") == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif block.get("type") == "tool_use":
            calls.append(tool_call(block.get("id"), block.get("name"), block.get("input"), at))
        elif block.get("type") != "redacted_thinking":
            texts.append(part_text(block, at))
    thought = "\n".join(thoughts)
    return [
        {
            "role": "assistant",
            "content": "\n".join(texts),
            **({"reasoning_content": thought} if thought else {}),
            **({"tool_calls": calls} if calls else {}),
        }
    ]
