from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.prompts import LocalTokenizer, load_tokenizer

Load = Callable[..., LocalTokenizer]

PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}{% endfor %}"
ADDED = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
MACRO = (
    "{% macro shown(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}"
    "{% if p.type == 'image' %}(image){% else %}[{{ p.text }}]{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}<{{ m.role }}>{{ shown(m.content) }}{% endfor %}"
)
PARTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %}[{{ p['text'] }}]{% endfor %}{% endfor %}"
)
MIXED = (
    "<system>{{ messages[0].content | trim }}{% for m in messages[1:] %}<{{ m.role }}>"
    "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
)
DUMPED = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson if m.role == 'tool' else m.content }}{% endfor %}"

PARTS = [{"type": "text", "text": "What is"}, {"type": "text", "text": " 1+1?"}]


@pytest.fixture
def load(tmp_path: Path, save_tokenizer: Callable[..., Path]) -> Load:
    def made(template: str, **settings: Any) -> LocalTokenizer:
        return load_tokenizer(save_tokenizer(tmp_path / "model", chat_template=template), **settings)

    return made


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


# Contents


@pytest.mark.parametrize(
    "content",
    [
        PARTS,
        tuple(PARTS),
        ["What is", " 1+1?"],
        [{"type": "input_text", "text": "What is"}, {"type": "output_text", "text": " 1+1?"}],
        [{"text": "What is 1+1?"}],
        [{"type": "text", "text": "What is 1+1?", "image_url": None}, {"type": "text", "text": None}, None],
        {"type": "text", "text": "What is 1+1?"},
    ],
)
@pytest.mark.parametrize("template", [PLAIN, ADDED, DUMPED])
def test_parts_are_one_text_for_a_template_that_takes_texts(load: Load, template: str, content: Any) -> None:
    assert load(template).render_chat(user(content)) == "<user>What is 1+1?"


@pytest.mark.parametrize("template", [MACRO, PARTS_ONLY])
def test_a_template_that_takes_parts_gets_them(load: Load, template: str) -> None:
    assert load(template).render_chat(user(PARTS)) == "<user>[What is][ 1+1?]"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}", "What is 1+1?"),
        ("[{{ m.content[0]['text'] }}]", "[What is 1+1?]"),
    ],
)
def test_a_template_that_takes_the_first_part_only_loses_none(load: Load, template: str, expected: str) -> None:
    tokenizer = load("{% for m in messages %}" + template + "{% endfor %}")
    assert tokenizer.render_chat(user(PARTS)) == expected
    assert tokenizer.render_chat(user("What is 1+1?")) == expected


def test_a_text_stays_one_where_both_are_taken_and_is_a_part_where_only_parts_are(load: Load) -> None:
    assert load(MACRO).render_chat(user("hi")) == "<user>hi"
    assert load(PARTS_ONLY).render_chat(user("hi")) == "<user>[hi]"


def test_forms_may_differ_by_role_and_order_of_asking_does_not_matter(load: Load) -> None:
    expected = "<system>Be brief.<user>[What is][ 1+1?]<assistant>[2]"
    conversations = [
        [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *user(PARTS)],
        [{"role": "system", "content": "Be brief."}, *user(PARTS), {"role": "assistant", "content": "2"}],
    ]
    for order in (conversations, conversations[::-1]):
        tokenizer = load(MIXED)
        assert all(expected.startswith(tokenizer.render_chat(each)) for each in order)


def test_parts_of_a_tools_answer_are_a_text_where_the_template_would_print_them_as_json(load: Load) -> None:
    messages = [*user("hi"), {"role": "tool", "content": [{"type": "text", "text": "42"}]}]
    assert load(DUMPED).render_chat(messages) == '<user>hi<tool>"42"'


@pytest.mark.parametrize("content", [None, "", []])
def test_a_content_that_is_null_or_empty_is_an_empty_text(load: Load, content: Any) -> None:
    assert load(ADDED).render_chat([*user("hi"), {"role": "assistant", "content": content}]) == "<user>hi<assistant>"


def test_images_are_parts_where_the_prompt_brings_them_and_refused_elsewhere(load: Load) -> None:
    messages = user([{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "this?"}])
    assert load(MACRO).render_chat(messages, num_images=1) == "<user>(image)[this?]"
    with pytest.raises(ConfigError, match=r"message 0 has a part of type .image.: content may hold text only"):
        load(MACRO).render_chat(messages)
    with pytest.raises(ConfigError, match="takes no parts in messages of the user, so no images"):
        load(PLAIN).render_chat(messages, num_images=1)
    with pytest.raises(ConfigError, match="type 'input_audio'"):
        load(MACRO).render_chat(user([{"type": "input_audio", "input_audio": {}}]), num_images=1)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ("hi", "message 0 must be an object with a role and a content, is a str"),
        ({"content": "hi"}, "must be an object with a role"),
        ({"role": "user"}, "message 0 has no content"),
        ({"role": "user", "content": 3}, "content of message 0 must be a text or a list of parts, is a int"),
        ({"role": "user", "content": [3]}, "a part of the content of message 0 must be a text or an object"),
        ({"role": "user", "content": [{"a": 1}]}, "a part of the content of message 0 has no type"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "the text of a part of the content of message 0"),
        ({"role": "assistant", "tool_calls": [3]}, "tool_calls of message 0 must be a list of objects"),
    ],
)
def test_what_is_no_message_is_named(load: Load, message: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load(PLAIN).render_chat([message])


# Arguments of calls

CALLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
TO_JSON = CALLS + "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
ITEMS = CALLS + "{% for k, v in c.function.arguments.items() %}{{ k }}:{{ v }};{% endfor %}{% endfor %}{% endfor %}"
EITHER = CALLS + "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}{% endfor %}{% endfor %}"
CONCATENATED = CALLS + "{{ c['function']['name'] + '(' + c['function']['arguments'] + ')' }}{% endfor %}{% endfor %}"
PRINTED = CALLS + "{% set f = c.function %}{{ f.name }}({{ f.arguments }}){% endfor %}{% endfor %}"
TEXT = '{"a":1, "b": "\u00e9"}'


def calling(arguments: Any, **message: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [*user("x"), {"role": "assistant", "tool_calls": [call], **message}]


@pytest.mark.parametrize("arguments", [TEXT, {"a": 1, "b": "\u00e9"}])
@pytest.mark.parametrize(
    ("template", "expected"),
    [(TO_JSON, 'add{"a": 1, "b": "\u00e9"}'), (ITEMS, "a:1;b:\u00e9;"), (EITHER, '{"a": 1, "b": "\u00e9"}')],
)
def test_arguments_are_objects_whatever_they_come_as(load: Load, template: str, expected: str, arguments: Any) -> None:
    assert load(template).render_chat(calling(arguments, content=None)) == f"<user>x<assistant>{expected}"


@pytest.mark.parametrize("template", [CONCATENATED, PRINTED])
def test_arguments_are_json_text_for_a_template_that_takes_text(load: Load, template: str) -> None:
    tokenizer = load(template)
    assert tokenizer.render_chat(calling(TEXT)) == f"<user>x<assistant>add({TEXT})"
    assert tokenizer.render_chat(calling({"a": 1, "b": "\u00e9"})).endswith('add({"a": 1, "b": "\u00e9"})')
    assert tokenizer.render_chat(calling(None)).endswith("add({})")


def test_no_arguments_are_an_empty_object_and_text_that_is_no_object_stays(load: Load) -> None:
    tokenizer = load(TO_JSON)
    for nothing in (None, "", "{}"):
        assert tokenizer.render_chat(calling(nothing)).endswith("add{}")
    assert tokenizer.render_chat(calling("{bad")).endswith('add"{bad"')


def test_calls_may_be_json_text_and_have_no_wrapper(load: Load) -> None:
    bare = CALLS + "{% set f = c.function or c %}{{ f.name }}{{ f.arguments | tojson }}{% endfor %}{% endfor %}"
    call = {"name": "add", "arguments": '{"a": 1}'}
    for calls in ([call], '[{"name": "add", "arguments": "{\\"a\\": 1}"}]'):
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        assert load(bare).render_chat([message]) == '<assistant>add{"a": 1}'


def test_arguments_fit_also_where_contents_are_parts(load: Load) -> None:
    template = TO_JSON.replace("{{ m.content }}", "{% for p in m.content %}[{{ p.text }}]{% endfor %}")
    assert load(template).render_chat(calling(TEXT, content="so")).startswith("<user>[x]<assistant>[so]add{")


def test_tools_may_be_json_text_and_their_parameters_too(load: Load) -> None:
    tokenizer = load("{{ tools | tojson }}{{ messages[0].content }}")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    as_text = '{"type": "function", "function": {"name": "f", "parameters": "{\\"type\\": \\"object\\"}"}}'
    assert tokenizer.render_chat(user("x"), tools=[as_text]) == tokenizer.render_chat(user("x"), tools=[tool])


# Date and variables

DATED = "{{ strftime_now('%d %b %Y %H:%M') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_the_date_is_what_the_tokenizer_was_made_with(load: Load) -> None:
    early, late = (load(DATED, template_date=datetime(2020, month, 3, 4, 5)) for month in (1, 2))
    assert early.render_chat(user("x")) == "03 Jan 2020 04:05<user>x"
    assert late.render_chat(user("x")) == "03 Feb 2020 04:05<user>x"
    assert early.render_chat(user("x")) == "03 Jan 2020 04:05<user>x"
    assert early.template_date == datetime(2020, 1, 3, 4, 5)


def test_a_template_that_asks_for_no_date_has_none(load: Load) -> None:
    assert load(PLAIN, template_date=datetime(2020, 1, 3)).template_date is None


def test_variables_are_those_of_the_tokenizer_and_before_them_those_of_a_call(load: Load) -> None:
    tokenizer = load("{{ thinking }}{{ messages[0].content }}", chat_template_kwargs={"thinking": "off "})
    assert tokenizer.render_chat(user("x")) == "off x"
    assert tokenizer.render_chat(user("x"), template_kwargs={"thinking": "on "}) == "on x"
    with pytest.raises(ConfigError, match="chat_template_kwargs: messages is not to be set"):
        tokenizer.render_chat(user("x"), template_kwargs={"messages": []})


# Templates with faults


def test_a_template_that_cannot_be_read_is_a_fault_of_the_checkpoint(load: Load) -> None:
    with pytest.raises(CheckpointError, match=r"chat template cannot be read: .* \(line 2\)"):
        load("x\n{% if %}")


def test_a_template_that_fails_names_the_cause(load: Load) -> None:
    with pytest.raises(ConfigError, match="chat template fails on the messages: ZeroDivisionError"):
        load("{{ 1 // 0 }}").render_chat(user("x"))


def test_half_of_a_surrogate_pair_is_rendered_as_a_replacement_character(load: Load) -> None:
    tokenizer = load("{{ tools | tojson }}" + PLAIN)
    text = tokenizer.render_chat(user("cut \ud83d"), tools=[{"name": "\udc00"}])
    assert text == '[{"name": "\ufffd"}]<user>cut \ufffd'
