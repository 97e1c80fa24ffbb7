from __future__ import annotations

from typing import Any

import pytest

from rollfeed.chat_apis import AnthropicMessages, ApiError, ErrorKind, ToolChoice

API = AnthropicMessages()
BODY: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def test_blocks_become_the_messages_of_a_template() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("one"), text("two")]}
    failed = {"type": "tool_result", "tool_use_id": "b", "content": "no such file", "is_error": True}
    asked = API.read(
        {
            **BODY,
            "system": [text("Be kind."), text("Be brief.")],
            "tools": [TOOL],
            "messages": [
                {"role": "user", "content": [text("What"), text("now?")]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        text("See."),
                        {"type": "tool_use", "id": "a", "name": "add", "input": {"a": 1}},
                        {"type": "tool_use", "id": "b", "name": "add", "input": {}},
                    ],
                },
                {"role": "user", "content": [result, failed, text("Go on.")]},
            ],
        }
    )
    calls = [
        {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}
        for name, arguments in (("a", {"a": 1}), ("b", {}))
    ]
    assert asked.messages == (
        {"role": "system", "content": "Be kind.\nBe brief."},
        {"role": "user", "content": "What\nnow?"},
        {"role": "assistant", "content": "See.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "one\ntwo", "tool_call_id": "a"},
        {"role": "tool", "content": "Error: no such file", "tool_call_id": "b"},
        {"role": "user", "content": "Go on."},
    )
    (tool,) = asked.tools
    assert tool["function"] == {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice.AUTO),
        ({"type": "any"}, ToolChoice.REQUIRED),
        ({"type": "tool", "name": "add"}, ToolChoice.REQUIRED),
        ({"type": "none"}, ToolChoice.NONE),
    ],
)
def test_the_choice_of_tools_is_understood(choice: Any, expected: ToolChoice) -> None:
    assert API.read({**BODY, "tools": [TOOL], "tool_choice": choice}).tool_choice is expected


def test_tools_that_only_its_makers_models_know_are_left_out_and_said() -> None:
    asked = API.read(
        {**BODY, "tools": [{"type": "bash_20250124", "name": "bash"}], "top_k": 5, "context_management": {}}
    )
    assert asked.tools == ()
    assert asked.left_out == ("tools[0] (bash_20250124)", "context_management")
    assert asked.top_k == 5


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "Begun"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [3]}]}, "content[0]"),
        ({"system": 3}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": ["x"]}}, "tool_choice"),
        ({"tools": [{"input_schema": {}}]}, "tools[0]"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ],
)
def test_what_cannot_be_served_is_refused_by_the_name_of_the_field(changes: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        API.read({**BODY, **changes})
    assert caught.value.param == param


def test_tokens_are_counted_without_a_limit_for_the_answer() -> None:
    body = {"model": "m", "messages": [{"role": "assistant", "content": "Begun"}]}
    assert API.read_count(body).messages == ({"role": "assistant", "content": "Begun"},)
    assert API.count(7) == {"input_tokens": 7}


def test_a_thread_is_gone_on_with_by_its_last_reply() -> None:
    created = API.read({**BODY, "thread": {"type": "create"}})
    assert (created.previous_response_id, created.keeps_tools, created.left_out) == (None, False, ())
    asked = API.read({**BODY, "thread": {"type": "continue", "previous_message_id": "msg_1"}})
    assert (asked.previous_response_id, asked.keeps_tools, asked.left_out) == ("msg_1", True, ())


def test_a_thread_that_is_not_there_is_told_as_clients_know_it() -> None:
    error = ApiError("there is no response msg_1", kind=ErrorKind.NOT_FOUND, param="previous_response_id")
    status, body = API.error(error)
    assert (status, body["error"]["details"]) == (404, {"error_code": "thread_not_found"})
