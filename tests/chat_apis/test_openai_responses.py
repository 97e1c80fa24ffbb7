from __future__ import annotations

from typing import Any

import pytest

from rollfeed.chat_apis import ApiError, OpenAIResponses

API = OpenAIResponses()


def test_items_become_the_messages_of_a_template() -> None:
    asked = API.read(
        {
            "model": "m",
            "instructions": "Be kind.",
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "low"},
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
                {"type": "message", "role": "user", "content": "?"},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "See."}]},
                {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"a": 1}'},
                {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "*** Begin"},
                {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "2"}]},
                {"type": "custom_tool_call_output", "call_id": "b", "output": "done"},
                {"type": "reasoning", "summary": [], "encrypted_content": "x"},
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": "no object"},
            ],
        }
    )
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in (
            ("a", "add", {"a": 1}),
            ("b", "patch", {"input": "*** Begin"}),
            ("c", "add", "no object"),
        )
    ]
    assert asked.messages == (
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "See.", "reasoning_content": "hm", "tool_calls": calls[:2]},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
        {"role": "tool", "content": "done", "tool_call_id": "b"},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
    )
    assert asked.left_out == ()


def test_tools_are_shown_as_functions_and_those_of_other_kinds_left_out() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
    asked = API.read(
        {
            "input": "?",
            "parallel_tool_calls": False,
            "tools": [
                {"type": "function", "name": "add", "parameters": None, "strict": True},
                {"type": "custom", "name": "patch", "description": "Patches.", "format": grammar},
                {"type": "local_shell"},
                {"type": "web_search", "external_web_access": False},
            ],
        }
    )
    add, patch = (tool["function"] for tool in asked.tools)
    assert add == {"name": "add", "parameters": {"type": "object", "properties": {}}}
    assert patch["parameters"]["required"] == ["input"]
    assert patch["description"] == "Patches.\n\nThe input has the form of this lark grammar:\nstart: x"
    assert asked.custom_tools == {"patch"}
    assert asked.left_out == ("tools[2] (local_shell)", "tools[3] (web_search)", "parallel_tool_calls")


def test_an_earlier_response_is_named_for_those_who_have_it() -> None:
    assert API.read({"input": [], "previous_response_id": "resp_1"}).previous_response_id == "resp_1"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": ["message"]}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": 3}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0]"),
        ({"input": "?", "background": True}, "background"),
        ({"input": "?", "conversation": "c"}, "conversation"),
        ({"input": "?", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": "?", "max_output_tokens": -1}, "max_output_tokens"),
        ({"input": "?", "tools": [{"type": "custom"}]}, "tools[0]"),
    ],
)
def test_what_cannot_be_served_is_refused_by_the_name_of_the_field(body: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        API.read(body)
    assert caught.value.param == param
