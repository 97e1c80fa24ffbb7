"""Replies of OpenAI's responses, whole and as events: items, each with its parts, opened, filled and closed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollfeed.chat_apis.api_error import ApiError
from rollfeed.chat_apis.asked import Asked
from rollfeed.chat_apis.chat_api import COMMENT, event, pieces
from rollfeed.chat_apis.openai_chat import openai_error, token_shown
from rollfeed.chat_apis.said import Finish, Said, SaidCall, TokenLogprob

_WHY = {Finish.LENGTH: "max_output_tokens", Finish.ABORT: "abort"}
_TEXT = {"reasoning": "reasoning_text", "message": "output_text"}
"""The kind of part in each kind of item that holds text."""


def items_of(asked: Asked, said: Said, *, reply_id: str) -> list[dict[str, Any]]:
    """Return the items of a turn: its thought, its text, its calls."""
    status = "incomplete" if said.finish in _WHY else "completed"
    items = []
    if said.reasoning:
        is_whole = said.content or said.calls
        part = _part("reasoning", said.reasoning)
        items.append(_text_item("reasoning", reply_id, [part], "completed" if is_whole else status))
    if said.content or not said.calls:
        items.append(_text_item("message", reply_id, [_part("message", said.content, said.logprobs or ())], status))
    items += [
        _call_item(asked, call, _input(asked, call), f"fc_{_key(reply_id)}_{number}", "completed")
        for number, call in enumerate(said.calls)
    ]
    return items


def response_of(
    asked: Asked, items: Sequence[Mapping[str, Any]], said: Said | None, *, reply_id: str, created: int
) -> dict[str, Any]:
    """Return the object of a response, which is under way where nothing has been said."""
    status, usage = "in_progress", None
    if said is not None:
        status, usage = "incomplete" if said.finish in _WHY else "completed", _usage(said)
    return {
        "id": reply_id,
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": _WHY[said.finish]} if said is not None and said.finish in _WHY else None,
        "instructions": None,
        "max_output_tokens": asked.max_new_tokens,
        "metadata": {},
        "model": asked.model,
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": asked.previous_response_id,
        "store": False,
        "temperature": asked.temperature,
        "tool_choice": asked.tool_choice.value,
        "tools": [],
        "top_p": asked.top_p,
        "truncation": "disabled",
        "usage": usage,
    }


class ResponseEvents:
    """Fits :class:`~rollfeed.chat_apis.ReplyEvents`."""

    def __init__(self, asked: Asked, *, reply_id: str, created: int) -> None:
        self._asked = asked
        self._reply_id = reply_id
        self._created = created
        self._number = 0
        self._output_index = -1
        self._open = ""
        """The kind of the item that is being filled."""
        self._told = {"reasoning": "", "message": ""}

    def opening(self, *, prompt_tokens: int = 0) -> bytes:
        del prompt_tokens
        response = self._response((), None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def ping(self) -> bytes:
        return COMMENT

    def progress(self, choice: int, reasoning: str, content: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        del choice, logprobs
        return self._more("reasoning", reasoning) + self._more("message", content)

    def finished(self, choice: int, said: Said) -> bytes:
        told = self.progress(choice, said.reasoning, said.content)
        items = items_of(self._asked, said, reply_id=self._reply_id)
        for item in items:
            if item["type"] in _TEXT:
                if item["type"] != self._open and not self._told[item["type"]]:
                    told += self._begin(item["type"])
                if item["type"] == self._open:
                    told += self._close(item)
        for call, item in zip(said.calls, items[len(items) - len(said.calls) :], strict=True):
            told += self._call(call, item)
        return told

    def ending(self, said: Sequence[Said]) -> bytes:
        (turn,) = said
        response = self._response(items_of(self._asked, turn, reply_id=self._reply_id), turn)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        content = openai_error(error)[1]["error"]
        response = {**self._response((), None), "status": "failed"}
        told = {"code": content["code"] or content["type"], "message": content["message"]}
        return self._event("response.failed", response={**response, "error": told})

    def _more(self, kind: str, text: str) -> bytes:
        told = b""
        for piece in pieces(text, len(self._told[kind])):
            if self._open != kind:
                told += self._end_thought() + self._begin(kind)
            scores: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            told += self._event(f"response.{_TEXT[kind]}.delta", **self._place(kind), delta=piece, **scores)
        self._told[kind] = max(self._told[kind], text, key=len)
        return told

    def _begin(self, kind: str) -> bytes:
        self._open = kind
        self._output_index += 1
        item = _text_item(kind, self._reply_id, [], "in_progress")
        return self._event("response.output_item.added", output_index=self._output_index, item=item) + self._event(
            "response.content_part.added", **self._place(kind), part=_part(kind, "")
        )

    def _end_thought(self) -> bytes:
        """Close the thought, which is over when the text begins."""
        if self._open != "reasoning":
            return b""
        part = _part("reasoning", self._told["reasoning"])
        return self._close(_text_item("reasoning", self._reply_id, [part], "completed"))

    def _close(self, item: Mapping[str, Any]) -> bytes:
        kind, self._open = self._open, ""
        (part,) = item["content"]
        scores = {"logprobs": part["logprobs"]} if kind == "message" else {}
        return (
            self._event(f"response.{_TEXT[kind]}.done", **self._place(kind), text=part["text"], **scores)
            + self._event("response.content_part.done", **self._place(kind), part=part)
            + self._event("response.output_item.done", output_index=self._output_index, item=item)
        )

    def _call(self, call: SaidCall, item: Mapping[str, Any]) -> bytes:
        self._output_index += 1
        is_custom = item["type"] == "custom_tool_call"
        name, field = ("custom_tool_call_input", "input") if is_custom else ("function_call_arguments", "arguments")
        place = {"item_id": item["id"], "output_index": self._output_index}
        empty = _call_item(self._asked, call, "", item["id"], "in_progress")
        told = self._event("response.output_item.added", output_index=self._output_index, item=empty)
        for piece in pieces(item[field]):
            told += self._event(f"response.{name}.delta", **place, delta=piece)
        told += self._event(f"response.{name}.done", **place, **{field: item[field]}, name=call.name)
        return told + self._event("response.output_item.done", output_index=self._output_index, item=item)

    def _place(self, kind: str) -> dict[str, Any]:
        return {"item_id": _item_id(kind, self._reply_id), "output_index": self._output_index, "content_index": 0}

    def _response(self, items: Sequence[Mapping[str, Any]], said: Said | None) -> dict[str, Any]:
        return response_of(self._asked, items, said, reply_id=self._reply_id, created=self._created)

    def _event(self, kind: str, **content: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **content}, name=kind)


def _key(reply_id: str) -> str:
    return reply_id.removeprefix("resp_")


def _item_id(kind: str, reply_id: str) -> str:
    return f"{'rs' if kind == 'reasoning' else 'msg'}_{_key(reply_id)}"


def _text_item(kind: str, reply_id: str, parts: list[dict[str, Any]], status: str) -> dict[str, Any]:
    own: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
    return {"id": _item_id(kind, reply_id), "type": kind, **own, "content": parts, "status": status}


def _part(kind: str, text: str, logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(map(token_shown, logprobs))}


def _input(asked: Asked, call: SaidCall) -> str:
    return str(call.arguments["input"]) if call.name in asked.custom_tools else call.arguments_text


def _call_item(asked: Asked, call: SaidCall, text: str, item_id: str, status: str) -> dict[str, Any]:
    is_custom = call.name in asked.custom_tools
    kind, field = ("custom_tool_call", "input") if is_custom else ("function_call", "arguments")
    item = {"id": item_id, "type": kind, "call_id": call.call_id, "name": call.name, field: text, "status": status}
    return item | ({"namespace": asked.namespaces[call.name]} if call.name in asked.namespaces else {})


def _usage(said: Said) -> dict[str, Any]:
    return {
        "input_tokens": said.prompt_tokens,
        "input_tokens_details": {"cached_tokens": said.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": said.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": said.prompt_tokens + said.completion_tokens,
    }
