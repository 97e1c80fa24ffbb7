"""OpenAI's responses: what is asked, and whole replies. The conversation is sent whole, nothing is stored."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollfeed.chat_apis.api_error import ApiError
from rollfeed.chat_apis.asked import Asked
from rollfeed.chat_apis.chat_api import ReplyEvents
from rollfeed.chat_apis.openai_chat import HARMLESS, ROLES, not_done, num_tops, openai_error
from rollfeed.chat_apis.reading import (
    Fields,
    content_of_parts,
    read_sampling,
    read_tool_choice,
    system_first,
    text_of_parts,
    tool_call,
    tool_definition,
)
from rollfeed.chat_apis.response_events import ResponseEvents, items_of, response_of
from rollfeed.chat_apis.said import Said

_HARMLESS = HARMLESS | {"include", "text", "truncation", "stream_options", "prompt_cache_options"}
_REFUSED: Mapping[str, tuple[Any, ...]] = {"background": (False,), "conversation": (), "prompt": (), "moderation": ()}
_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class OpenAIResponses:
    """``/v1/responses``."""

    path = "/v1/responses"

    def read(self, body: Any) -> Asked:
        fields = Fields(body)
        fields.refuse(_REFUSED)
        output_format = Fields(fields.object("text")).object("format").get("type")
        if output_format not in (None, "text"):
            raise ApiError("text.format is not supported here: leave it out", param="text.format")
        instructions = fields.text("instructions")
        messages = [{"role": "system", "content": instructions}] if instructions else []
        given = fields.take("input")
        if isinstance(given, str):
            messages.append({"role": "user", "content": given})
        else:
            messages += _messages(fields.objects("input"))
        previous = fields.text("previous_response_id")
        if given in (None, []) and not previous:
            raise ApiError("input must be a text, or a list of at least one item", param="input")
        tools = _Tools()
        for index, tool in enumerate(fields.objects("tools")):
            tools.add(tool, f"tools[{index}]")
        left_out = tools.left_out
        choice = read_tool_choice(fields.take("tool_choice"), tools.shown, left_out)
        left_out += not_done(fields, tools.shown)
        included = fields.take("include")
        with_logprobs = isinstance(included, list) and "message.output_text.logprobs" in included
        asked = {"max_new_tokens": fields.integer("max_output_tokens", least=1), **read_sampling(fields, stop="stop")}
        asked["num_tops"] = num_tops(fields, with_logprobs=with_logprobs)
        left_out += fields.rest(_HARMLESS)
        return Asked(
            messages=tuple(system_first(messages)),
            tools=tuple(tools.shown),
            custom_tools=frozenset(tools.custom),
            namespaces=tools.namespaces,
            tool_choice=choice,
            with_logprobs=with_logprobs,
            previous_response_id=previous,
            left_out=tuple(left_out),
            **asked,
        )

    def new_id(self) -> str:
        return f"resp_{secrets.token_hex(16)}"

    def reply(self, asked: Asked, said: Sequence[Said], *, reply_id: str, created: int) -> dict[str, Any]:
        (turn,) = said
        items = items_of(asked, turn, reply_id=reply_id)
        return response_of(asked, items, turn, reply_id=reply_id, created=created)

    def events(self, asked: Asked, *, reply_id: str, created: int) -> ReplyEvents:
        return ResponseEvents(asked, reply_id=reply_id, created=created)

    def error(self, error: ApiError) -> tuple[int, dict[str, Any]]:
        return openai_error(error)


@dataclass(slots=True)
class _Tools:
    """The tools of a body."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    custom: set[str] = field(default_factory=set)
    namespaces: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, tool: Mapping[str, Any], where: str, *, namespace: str = "") -> None:
        """Add what a template can show of a tool."""
        kind = tool.get("type")
        if kind == "namespace" and not namespace:
            for index, inner in enumerate(Fields(tool).objects("tools")):
                self.add(inner, f"{where}.tools[{index}]", namespace=str(tool.get("name")))
            return
        if kind not in ("function", "custom"):
            self.left_out.append(f"{where} ({kind!s:.40})")
            return
        definition = tool_definition(_as_function(tool) if kind == "custom" else tool, where)
        name = definition["function"]["name"]
        if any(each["function"]["name"] == name for each in self.shown):
            self.left_out.append(f"{where} (another {name:.40})")
            return
        self.shown.append(definition)
        if kind == "custom":
            self.custom.add(name)
        if namespace:
            self.namespaces[name] = namespace


def _as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a custom tool, which takes a text of a certain form, as a function of one argument."""
    text, form = tool.get("description") or "", Fields(tool).object("format")
    if form.get("definition"):
        text = f"{text}\n\nThe input has the form of this {form.get('syntax')} grammar:\n{form['definition']}"
    return {"name": tool.get("name"), "description": text, "parameters": _CUSTOM}


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages that items are: a thought, a text and calls in this order are one turn of the assistant."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    """The assistant's, as long as it may go on."""
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "message":
            read = _message(item, where)
            if read["role"] == "assistant" and turn is not None and not turn["content"] and "tool_calls" not in turn:
                turn["content"] = read["content"]
                continue
            messages.append(read)
            turn = read if read["role"] == "assistant" else None
        elif kind == "reasoning":
            turn = {"role": "assistant", "content": ""}
            if thought := _thought(item, where):
                turn["reasoning_content"] = thought
            messages.append(turn)
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments") if kind == "function_call" else {"input": str(item.get("input") or "")}
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            call = tool_call(item.get("call_id"), item.get("name"), arguments, where)
            turn.setdefault("tool_calls", []).append(call)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            turn = None
            content = content_of_parts(item.get("output"), f"{where}.output", between="\n")
            messages.append({"role": "tool", "content": content, "tool_call_id": str(item.get("call_id") or "")})
        else:
            raise ApiError(f"{where} is of type {kind!s:.80}, which is not supported here", param=where)
    return [message for message in messages if message != {"role": "assistant", "content": ""}]


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = ROLES.get(item["role"]) if isinstance(item.get("role"), str) else None
    if role in (None, "tool"):
        raise ApiError(f"{where}.role must be user, assistant, system or developer", param=f"{where}.role")
    read = content_of_parts if role == "user" else text_of_parts
    return {"role": role, "content": read(item.get("content"), f"{where}.content", between="\n")}


def _thought(item: Mapping[str, Any], where: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ApiError(f"{where} must have a list of parts", param=where)
    return "\n".join(str(part.get("text") or "") for part in parts)
