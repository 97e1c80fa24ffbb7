"""Calls are read in the format of the model's family; what cannot be read is something to tell the policy."""

from __future__ import annotations

from random import Random

import pytest
from tests.conversations.zoo.families import FAMILIES, load

from rollfeed.conversations import Call, SaidTurn, UnreadableCall, call_syntax, read_turn
from rollfeed.protocols import CallFormat
from rollfeed.testing import CharTokenizer

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TWO = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = {"say": TEXT, "add": TWO}
SAY = Call("say", {"text": "hi"})
ADD = Call("add", {"a": 1, "b": 2})
SAY_JSON = '{"name": "say", "arguments": {"text": "hi"}}'
ADD_JSON = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


def read(text: str, call_format: CallFormat) -> SaidTurn:
    return read_turn(text, call_format, tools=TOOLS)


@pytest.mark.parametrize(
    ("call_format", "text", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "say", "arguments": {"text": "hi"}}\n</tool_call>', [SAY]),
        ("hermes", '<tool_call>{"name": "say", "arguments": "{\\"text\\": \\"hi\\"}"}</tool_call>', [SAY]),
        ("hermes", '<tool_call>{"name": "say", "arguments": {"text": "hi"}}', [SAY]),
        ("hermes", '<tool_call>\n{"function": {"name": "say", "arguments": {"text": "hi"}}}\n</tool_call>', [SAY]),
        (
            "hermes",
            '<tool_call>{"name": "say", "arguments": {"text": "hi"}}</tool_call>\n'
            '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
            [SAY, ADD],
        ),
        ("hermes", "<tool_call>\n<function=say>\n<parameter=text>\nhi\n</parameter>\n</function>\n</tool_call>", [SAY]),
        (
            "hermes",
            "<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>hi</arg_value>\n</tool_call>",
            [SAY],
        ),
        ("hermes", '<tool_call>say\n{"text": "hi"}</tool_call>', [SAY]),
        ("hermes", '<call>say {"text": "hi"}</call>', [SAY]),
        ("json", '{"name": "say", "parameters": {"text": "hi"}}', [SAY]),
        ("json", f"I ask. {SAY_JSON}; {ADD_JSON}", [SAY, ADD]),
        ("json", f"[TOOL_CALLS][{SAY_JSON}, {ADD_JSON}]", [SAY, ADD]),
        ("json", '[TOOL_CALLS]say[ARGS]{"text": "hi"}', [SAY]),
        ("json", '```json\n{"name": "say", "arguments": {"text": "hi"}}\n```', [SAY]),
        ("json", '<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>say\n```json\n{"text": "hi"}\n```', [SAY]),
        ("json", '<\uff5ctool▁call▁begin\uff5c>say<\uff5ctool▁sep\uff5c>{"text": "hi"}', [SAY]),
        ("json", 'commentary to=functions.say <|constrain|>json<|message|>{"text": "hi"}', [SAY]),
        ("tags", "<say>hi</say>", [SAY]),
        ("tags", 'both: <say> hi\n</say> <add>{"a": 1, "b": 2}</add>', [SAY, ADD]),
        ("tags", "<say>hi", [SAY]),
        ("tags", '<say>{"text": "hi"}</say>', [SAY]),
    ],
)  # fmt: skip
def test_calls_are_read_as_families_write_them(call_format: str, text: str, calls: list[Call]) -> None:
    assert list(read(text, CallFormat(call_format)).calls) == calls


@pytest.mark.parametrize(
    ("call_format", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "say", "arguments": {</tool_call>', "not valid JSON"),
        ("hermes", "<tool_call></tool_call>", "empty"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "no name"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "no name"),
        ("hermes", '<tool_call>{"name": "say", "arguments": [1]}</tool_call>', "must be a JSON object"),
        ("hermes", '<tool_call>{"name": "say", "arguments": {"text": NaN}}</tool_call>', "NaN"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ("hermes", "<tool_call>[3]</tool_call>", "no name"),
        ("hermes", '<tool_call>{"name": "say", "arguments": {"text": 1e999}}</tool_call>', "too large a number"),
        ("hermes", f'<tool_call>{{"name": "say", "arguments": {{"text": {10**30}}}}}</tool_call>', "18 digits"),
        ("hermes", f'<tool_call>say {{"text": {"[" * 40}{"]" * 40}}}</tool_call>', "nested too deeply"),
        ("json", f'{{"name": "say", "arguments": {{"text": {"[" * 40}{"]" * 40}}}}}', "nested too deeply"),
        ("json", '{"name": "say", "arguments": {"text": ', "not valid JSON"),
        ("json", '{"name": "say", "arguments": 7}', "must be a JSON object"),
        ("tags", "<add>1</add>", "a, b"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(call_format: str, text: str, problem: str) -> None:
    (call,) = read(text, CallFormat(call_format)).calls
    assert isinstance(call, UnreadableCall)
    assert problem in call.problem


@pytest.mark.parametrize("call_format", ["hermes", "json", "tags"])
@pytest.mark.parametrize(
    "text",
    ["The answer is 3.", '{"answer": 3}', "{x}", "", "<b>3</b>", "<think><say>hi</say></think> 3", '[{"a": [1]}]'],
)
def test_an_answer_is_no_call(call_format: str, text: str) -> None:
    assert read(text, CallFormat(call_format)) == SaidTurn(text, ())


def test_a_call_in_a_thought_is_not_made() -> None:
    call = '<tool_call>{"name": "say", "arguments": {"text": "hi"}}</tool_call>'
    assert read(f"<think>{call}</think>no", CallFormat.HERMES).calls == ()
    assert read(f"<think>perhaps {call}", CallFormat.HERMES).calls == ()
    turn = read(f"{call}</think>\n\nyes {call}", CallFormat.HERMES)
    assert turn == SaidTurn(f"{call}</think>\n\nyes", (SAY,))


def test_a_flood_of_calls_is_cut() -> None:
    turn = read('<tool_call>{"name": "say", "arguments": {"text": "hi"}}</tool_call>' * 1_000, CallFormat.HERMES)
    assert turn.calls[:16] == (SAY,) * 16
    assert turn.calls[16:] == (UnreadableCall("984 further calls were not made: at most 16 are in one turn"),)


@pytest.mark.parametrize("call_format", CallFormat)
def test_nothing_that_is_sampled_raises(call_format: CallFormat) -> None:
    random = Random(str(call_format))
    pieces = [
        *("<tool_call>", "</tool_call>", "<call>", "<say>", "</say>", "<add>", "{", "}", "[", "]", '"name": ', '"say"'),
        *(', "arguments": ', "<function=say>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>", "\ud83d"),
        *("<think>", "</think>", "\n", " ", "1e999", "x", "[TOOL_CALLS]", "[ARGS]", "\\", "\x00", '{"name": "say", '),
    ]
    for _ in range(2_000):
        text = "".join(random.choices(pieces, k=random.randrange(12)))
        turn = read(text, call_format)
        assert turn.calls or turn.text == text
        turn.forms()


def test_the_format_is_what_the_template_shows_of_a_call() -> None:
    found = {name: call_syntax(load(name), CallFormat.AUTO) for name in FAMILIES}
    json = {name for name, syntax in found.items() if syntax.call_format is CallFormat.JSON}
    assert json == {"llama3", "mistral"}
    showing = {name for name, syntax in found.items() if syntax.shows_tools}
    assert showing == {"qwen2.5", "qwen3", "llama3", "mistral", "glm4"}
    assert not found["gemma"].results_follow_text
    assert not found["gemma"].results_follow_calls
    assert found["mistral"].results_follow_calls
    assert not found["mistral"].results_follow_text


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tools])
def test_a_call_that_the_template_shows_is_read_again(name: str) -> None:
    tokenizer, syntax = load(name), call_syntax(load(name), CallFormat.AUTO)
    call = Call("say", {"text": 'a "b"\n{"c": [1]} é 🙂 </x>'})
    question = {"role": "user", "content": "?"}
    before = tokenizer.render_chat([question], add_generation_prompt=True)
    after = tokenizer.render_chat([question, *SaidTurn("", (call,)).forms()], add_generation_prompt=False)
    said = after[len(before) - len("<|im_start|>assistant\n") if not after.startswith(before) else len(before) :]
    assert read_turn(said, syntax.call_format, tools=TOOLS).calls == (call,)


@pytest.mark.parametrize("name", FAMILIES)
def test_results_are_told_in_a_form_that_the_template_takes(name: str) -> None:
    tokenizer, syntax = load(name), call_syntax(load(name), CallFormat.AUTO)
    for turn in (SaidTurn("", (SAY,)), SaidTurn("", (UnreadableCall("no"),))):
        answers = ["first answer"]
        told = syntax.results(turn, answers)
        form = (turn.forms() or [{"role": "assistant", "content": "x"}])[0]
        shown = tokenizer.render_chat([{"role": "user", "content": "?"}, form, *told])
        assert "first answer" in shown


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_with_calls_is_shown_whole_whatever_the_template_takes(name: str) -> None:
    tokenizer, syntax = load(name), call_syntax(load(name), CallFormat.AUTO)
    messages = [
        {"role": "user", "content": "the question"},
        *SaidTurn("", (SAY, Call("say", {"text": "second call"}))).forms(),
        {"role": "tool", "tool_call_id": "call00000", "name": "say", "content": "first answer"},
        {"role": "tool", "tool_call_id": "call00001", "name": "say", "content": "second answer"},
    ]
    definitions = [{"type": "function", "function": {"name": "say", "description": "told of", "parameters": TEXT}}]
    told = syntax.introduced(syntax.adapted(messages), definitions)
    shown = tokenizer.render_chat(told, tools=definitions)
    for text in ("told of", "the question", "hi", "second call", "first answer", "second answer"):
        assert shown.count(text) >= 1, text
    assert shown.index("second call") < shown.index("first answer") < shown.index("second answer")


def test_texts_without_a_template_are_told_how_to_call() -> None:
    syntax = call_syntax(CharTokenizer(), CallFormat.AUTO, is_chat=False)
    told = syntax.introduce([{"type": "function", "function": {"name": "say", "parameters": TEXT}}])
    assert '{"name": "say"' in told
    assert "<tool_call>" in told
    assert syntax.results(SaidTurn("", (SAY,)), ["yes"])[0]["role"] == "user"
