"""OpenAI's chat completions, with what other servers have added to them: thoughts, SGLang's sampling parameters."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rollfeed.chat_apis.api_error import ApiError, ErrorKind
from rollfeed.chat_apis.asked import Asked
from rollfeed.chat_apis.chat_api import COMMENT, ReplyEvents, event, pieces
from rollfeed.chat_apis.reading import (
    Fields,
    content_of_parts,
    read_sampling,
    read_tool_choice,
    text_of_parts,
    tool_call,
    tool_definition,
)
from rollfeed.chat_apis.said import Finish, Said, SaidCall, TokenLogprob

HARMLESS = frozenset(
    {
        *("metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity", "rid"),
        *("prompt_cache_retention", "reasoning_effort", "reasoning", "extra_headers", "client_metadata"),
        *("return_token_ids", "include_reasoning", "separate_reasoning", "stream_reasoning"),
    }
)
"""Fields that need not be followed for the answer to be one."""
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "continue_final_message": (False,),
}
_KEPT = (
    *(("name", "name"), ("tool_call_id", "tool_call_id")),
    *(("reasoning", "reasoning_content"), ("reasoning_content", "reasoning_content")),
)
"""Fields of messages, and what they are called here."""
ROLES = {**{role: role for role in ("system", "user", "assistant", "tool")}, "developer": "system", "function": "tool"}
_STATUS = {
    ErrorKind.INVALID_REQUEST: (400, "invalid_request_error", None),
    ErrorKind.AUTHENTICATION: (401, "invalid_request_error", "invalid_api_key"),
    ErrorKind.PERMISSION: (403, "permission_error", "forbidden"),
    ErrorKind.NOT_FOUND: (404, "invalid_request_error", "not_found"),
    ErrorKind.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    ErrorKind.RATE_LIMIT: (429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorKind.OVERLOADED: (503, "server_error", "overloaded"),
    ErrorKind.API_ERROR: (500, "server_error", None),
}
_FINISH = {Finish.STOP_SEQUENCE: "stop"}


class OpenAIChat:
    """``/v1/chat/completions``."""

    path = "/v1/chat/completions"

    def read(self, body: Any) -> Asked:
        fields = Fields(body)
        fields.refuse(_REFUSED)
        messages = tuple(_message(each, f"messages[{index}]") for index, each in enumerate(fields.objects("messages")))
        if not messages:
            raise ApiError("messages must be a list of at least one message", param="messages")
        tools, left_out = _tools(fields.objects("tools"))
        choice = read_tool_choice(fields.take("tool_choice"), tools, left_out)
        limits = [fields.integer(name, least=1) for name in ("max_completion_tokens", "max_tokens")]
        with_logprobs = fields.flag("logprobs")
        left_out += not_done(fields, tools)
        asked = {
            "num_tops": num_tops(fields, with_logprobs=with_logprobs),
            "num_choices": fields.integer("n", least=1, most=4096) or 1,
            "include_usage": Fields(fields.object("stream_options")).flag("include_usage"),
            **read_sampling(fields, stop="stop"),
        }
        left_out += fields.rest(HARMLESS)
        return Asked(
            messages=messages,
            tools=tuple(tools),
            tool_choice=choice,
            max_new_tokens=limits[1] if limits[0] is None else limits[0],
            with_logprobs=with_logprobs,
            left_out=tuple(left_out),
            **asked,
        )

    def new_id(self) -> str:
        return f"chatcmpl-{secrets.token_hex(16)}"

    def reply(self, asked: Asked, said: Sequence[Said], *, reply_id: str, created: int) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _told(turn),
                "logprobs": _logprobs(turn.logprobs),
                "finish_reason": _FINISH.get(turn.finish, turn.finish.value),
                "matched_stop": turn.stop_sequence,
            }
            for index, turn in enumerate(said)
        ]
        envelope = {"id": reply_id, "object": "chat.completion", "created": created, "model": asked.model}
        return {**envelope, "choices": choices, "usage": _usage(said)}

    def events(self, asked: Asked, *, reply_id: str, created: int) -> ReplyEvents:
        return _ChatEvents(asked, reply_id=reply_id, created=created)

    def error(self, error: ApiError) -> tuple[int, dict[str, Any]]:
        return openai_error(error)


class _ChatEvents:
    def __init__(self, asked: Asked, *, reply_id: str, created: int) -> None:
        self._asked = asked
        self._envelope = {"id": reply_id, "object": "chat.completion.chunk", "created": created, "model": asked.model}
        self._told = [[0, 0, 0] for _ in range(asked.num_choices)]
        """Characters of thought and of content, and tokens, that have been told of each choice."""

    def opening(self, *, prompt_tokens: int = 0) -> bytes:
        del prompt_tokens
        deltas = range(self._asked.num_choices)
        return b"".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in deltas)

    def ping(self) -> bytes:
        return COMMENT

    def progress(self, choice: int, reasoning: str, content: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        told = self._told[choice]
        deltas = [{"reasoning_content": piece} for piece in pieces(reasoning, told[0])]
        deltas += [{"content": piece} for piece in pieces(content, told[1])]
        told[:] = max(told[0], len(reasoning)), max(told[1], len(content)), told[2] + len(logprobs)
        if not deltas and logprobs:
            deltas.append({})
        first = _logprobs(logprobs) if logprobs else None
        return b"".join(
            self._chunk(choice, delta, logprobs=first if at == 0 else None) for at, delta in enumerate(deltas)
        )

    def finished(self, choice: int, said: Said) -> bytes:
        rest = (said.logprobs or ())[self._told[choice][2] :]
        told = self.progress(choice, said.reasoning, said.content, rest)
        for index, call in enumerate(said.calls):
            told += self._chunk(choice, {"tool_calls": [{"index": index, **_call(call, "")}]})
            for piece in pieces(call.arguments_text):
                told += self._chunk(choice, {"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        return told + self._chunk(choice, {}, said=said)

    def ending(self, said: Sequence[Said]) -> bytes:
        usage = b""
        if self._asked.include_usage:
            usage = event({**self._envelope, "choices": [], "usage": _usage(said)})
        return usage + b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        return event(openai_error(error)[1]) + b"data: [DONE]\n\n"

    def _chunk(self, choice: int, delta: Mapping[str, Any], *, logprobs: Any = None, said: Said | None = None) -> bytes:
        shown: dict[str, Any] = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if said is not None:
            shown["finish_reason"] = _FINISH.get(said.finish, said.finish.value)
            shown["matched_stop"] = said.stop_sequence
        return event({**self._envelope, "choices": [shown]})


def not_done(fields: Fields, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the fields of a body of OpenAI's APIs that ask for what is not done here."""
    return ["parallel_tool_calls"] if fields.take("parallel_tool_calls") is False and tools else []


def num_tops(fields: Fields, *, with_logprobs: bool) -> int:
    """Return how many of the likeliest tokens a body asks for; as OpenAI has it, 20 at most, and with logprobs only."""
    return (fields.integer("top_logprobs", least=0, most=20) or 0) if with_logprobs else 0


def openai_error(error: ApiError) -> tuple[int, dict[str, Any]]:
    """Return HTTP status and body of an error, as all of OpenAI's APIs have it."""
    status, kind, code = _STATUS[error.kind]
    content = {"message": error.message, "type": kind, "param": error.param, "code": error.code or code}
    return status, {"error": content}


def _tools(given: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tools that a template can show, and what is left out."""
    tools, left_out = [], []
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        if tool.get("type", "function") == "function":
            tools.append(tool_definition(Fields(tool).object("function") or tool, where))
        else:
            left_out.append(f"{where} ({tool.get('type')!s:.40})")
    return tools, left_out


def _message(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = ROLES.get(given["role"]) if isinstance(given.get("role"), str) else None
    if role is None:
        raise ApiError(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    calls = given.get("tool_calls") or []
    if not calls and "content" not in given:
        raise ApiError(f"{where} has no content", param=f"{where}.content")
    content = given.get("content")
    if not isinstance(content, str):
        read = content_of_parts if role in ("user", "tool") else text_of_parts
        content = read(content, f"{where}.content")
    message: dict[str, Any] = {"role": role, "content": content}
    for name, ours in _KEPT:
        if value := given.get(name):
            if not isinstance(value, str):
                raise ApiError(f"{where}.{name} must be a text", param=f"{where}.{name}")
            message[ours] = value
    if calls:
        if role != "assistant" or not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise ApiError(
                f"{where}.tool_calls must be a list of objects, of the assistant", param=f"{where}.tool_calls"
            )
        message["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    return message


def _read_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = Fields(call).object("function")
    return tool_call(call.get("id"), function.get("name"), function.get("arguments"), where)


def _told(said: Said) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None if said.calls and not said.content else said.content,
        "refusal": None,
        **({"reasoning_content": said.reasoning} if said.reasoning else {}),
        **({"tool_calls": [_call(call, call.arguments_text) for call in said.calls]} if said.calls else {}),
    }


def _call(call: SaidCall, arguments: str) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {"content": [token_shown(each) for each in logprobs], "refusal": None}


def token_shown(each: TokenLogprob) -> dict[str, Any]:
    """Return a token with its log-probability, as OpenAI's APIs tell it."""
    shown = {"token": each.token, "logprob": each.logprob, "bytes": list(each.token.encode())}
    return {**shown, "top_logprobs": [token_shown(top) for top in each.tops]}


def _usage(said: Sequence[Said]) -> dict[str, Any]:
    completion_tokens = sum(turn.completion_tokens for turn in said)
    return {
        "prompt_tokens": said[0].prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": said[0].prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": said[0].cached_tokens},
    }
