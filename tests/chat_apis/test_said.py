from __future__ import annotations

from typing import Any

import pytest

from rollfeed.chat_apis import (
    ApiError,
    Asked,
    Finish,
    Said,
    SaidCall,
    call_openings,
    next_call,
    opens_thought,
    said_so_far,
)
from rollfeed.protocols import CallFormat
from rollfeed.testing import CharTokenizer
from rollfeed.types import FinishKind, FinishReason

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
PATCH = {
    "type": "function",
    "function": {"name": "patch", "parameters": {"type": "object", "properties": {"input": {"type": "string"}}}},
}
ASKED = Asked(model="m", messages=({"role": "user", "content": "?"},), tools=(ADD, PATCH))
WITHOUT = Asked(model="m", messages=ASKED.messages)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "2"}}\n</tool_call>'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def parts(said: Said) -> tuple[str, str, list[tuple[str, str]]]:
    return said.reasoning, said.content, [(call.name, call.arguments_text) for call in said.calls]


def test_a_turn_is_taken_apart(saying: object) -> None:
    said = saying(f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}\n{CALL}", ASKED, first_call=7)  # type: ignore[operator]
    assert parts(said) == ("hm", "Let me see.", [("add", '{"a": 1, "b": 2}')] * 2)
    assert [call.call_id for call in said.calls] == ["call00007", "call00008"]
    assert (said.finish, said.prompt_tokens, said.cached_tokens) == (Finish.TOOL_CALLS, 11, 4)


@pytest.mark.parametrize(
    ("text", "in_thought", "expected"),
    [
        ("hm\n</think>\n4", True, ("hm", "4", [])),
        ("still at it", True, ("still at it", "", [])),
        ("<think>cut", False, ("cut", "", [])),
        ("no thought </think> here", False, ("", "no thought </think> here", [])),
        (f"<think>{CALL}</think>", False, (CALL, "", [])),
        (XML, False, ("", "", [("add", '{"a": 1}')])),
        ("<tool_call>{broken</tool_call>", False, ("", "<tool_call>{broken</tool_call>", [])),
        (f"{CALL}<tool_call>[", False, ("", f"{CALL}<tool_call>[", [])),
        ("<tool_call>nobody</tool_call>", False, ("", "", [("nobody", "{}")])),
        ("plain", False, ("", "plain", [])),
    ],
)
def test_what_can_be_read_is_told_apart_and_the_rest_is_text(
    saying: object, text: str, in_thought: bool, expected: object
) -> None:
    assert parts(saying(text, ASKED, in_thought=in_thought)) == expected  # type: ignore[operator]


def test_calls_are_not_read_where_none_are_wanted(saying: object) -> None:
    assert parts(saying(CALL, WITHOUT)) == ("", CALL, [])  # type: ignore[operator]


def test_json_that_names_no_tool_is_an_answer(saying: object) -> None:
    answer = '{"name": "Ann", "arguments": {}}'
    assert parts(saying(answer, ASKED, call_format=CallFormat.JSON)) == ("", answer, [])  # type: ignore[operator]


@pytest.mark.parametrize(
    "arguments", ['{"input": "*** Begin"}', '{"patch": "*** Begin"}', '{"input": "*** Begin", "x": 1}']
)
def test_a_custom_tool_is_told_one_text(saying: object, arguments: str) -> None:
    asked = Asked(model="m", messages=ASKED.messages, tools=ASKED.tools, custom_tools=frozenset({"patch"}))
    said = saying(f'<tool_call>{{"name": "patch", "arguments": {arguments}}}</tool_call>', asked)  # type: ignore[operator]
    assert said.calls == (SaidCall("call00000", "patch", {"input": "*** Begin"}),)


@pytest.mark.parametrize(
    ("finish", "expected", "stop", "content"),
    [
        (FinishReason(FinishKind.STOP, "END"), Finish.STOP_SEQUENCE, "END", "one "),
        (FinishReason(FinishKind.STOP, ord("!")), Finish.STOP, None, "one END"),
        (FinishReason(FinishKind.LENGTH), Finish.LENGTH, None, "one END!"),
        (FinishReason(FinishKind.ABORT), Finish.ABORT, None, "one END!"),
    ],
)
def test_a_turn_says_why_it_ended_and_leaves_out_what_ended_it(
    saying: object, finish: FinishReason, expected: Finish, stop: str | None, content: str
) -> None:
    said = saying("one END!", WITHOUT, finish=finish)  # type: ignore[operator]
    assert (said.finish, said.stop_sequence, said.content) == (expected, stop, content)
    assert said.completion_tokens == 8


@pytest.mark.parametrize("call_format", [CallFormat.HERMES, CallFormat.JSON, CallFormat.TAGS])
@pytest.mark.parametrize(
    "text",
    [
        f"<think>so it\nis</think>\n\nText <b>bold</b>. \n {CALL} {CALL}",
        "Text <tool_ is no call, [1] neither {2} \n",
        f"  {CALL}",
        "<think> cut",
        "<thi",
        'Text {"name": "add", "arguments": {"a": 1}} more',
        "Text <add>[1]</add> more",
    ],
)
def test_what_is_told_of_a_turn_under_way_is_never_taken_back(
    saying: object, text: str, call_format: CallFormat
) -> None:
    said = saying(text, ASKED, call_format=call_format)  # type: ignore[operator]
    openings = call_openings(ASKED, call_format)
    told = [said_so_far(text[:size], openings, in_thought=False) for size in range(len(text) + 1)]
    for (reasoning, content), (more_reasoning, more_content) in zip(
        told, [*told[1:], (said.reasoning, said.content)], strict=True
    ):
        assert more_reasoning.startswith(reasoning)
        assert more_content.startswith(content)


def test_text_is_told_at_once_where_there_are_no_tools() -> None:
    assert said_so_far("a < b", call_openings(WITHOUT, CallFormat.HERMES), in_thought=False) == ("", "a < b")


def test_ids_of_calls_go_on_from_those_of_the_conversation() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [{**call, "id": each}]} for each in ("x", "call00041")
    ]
    assert next_call(messages) == 42
    assert next_call([]) == 0


def test_the_opening_of_a_thought_is_seen_at_the_end_of_a_prompt() -> None:
    tokenizer = CharTokenizer()
    assert opens_thought(tokenizer.encode("assistant\n<think>\n", add_special_tokens=False), tokenizer)
    assert not opens_thought(tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False), tokenizer)


@pytest.mark.parametrize(
    "more",
    [
        {"content": "x" * 700},
        {"content": [{"type": "text", "text": "x" * 700}]},
        {"reasoning_content": "x" * 700},
        {"tool_calls": [{"function": {"name": "add", "arguments": {"a": "x" * 700}}}]},
        {"tool_calls": [{"function": {"name": "add", "arguments": "x" * 700}}]},
        None,
    ],
    ids=["text", "part", "thought", "argument", "arguments that are none", "tool"],
)
def test_what_no_context_has_room_for_is_refused_wherever_it_is_written(more: dict[str, Any] | None) -> None:
    message = {"role": "assistant", "content": "", **(more or {})}
    asked = Asked(model="m", messages=(message,), tools=() if more else ({**ADD, "description": "x" * 700},))
    asked.check_length(20)
    with pytest.raises(ApiError, match="context"):
        asked.check_length(10)
