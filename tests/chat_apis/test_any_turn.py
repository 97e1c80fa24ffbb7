"""Whatever is sampled is told without being taken back, and given back it is what was told."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from rollfeed.chat_apis import (
    AnthropicMessages,
    Asked,
    OpenAIChat,
    OpenAIResponses,
    Said,
    call_openings,
    said_so_far,
    stream_of,
)
from rollfeed.protocols import CallFormat

PIECES = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<call>",
        "<add>",
        "</add>",
        "{",
        "}",
        "[",
        "]",
        '"name": "add"',
    ),
    *(', "arguments": ', '{"name": "add", "arguments": {"a": 1}}', '{"name": "patch", "arguments": {"input": "x"}}'),
    *(
        "<function=add>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "\n",
        " ",
        "text",
        "é🙂",
        "END",
        "<thi",
        "<tool",
    ),
    *("<tool_call>", '{"name": "add", "arguments": {"a": "2", "b": "1", "c": "x"}}', "</tool_call>"),
    *('<tool_call>{"name": "a\\ud83d", "arguments": {"\\ud83d": ["\\udc00"]}}</tool_call>', "<add>", "</add>"),
]
ODD: dict[str, Any] = {"type": 3, "enum": 5, "anyOf": 7}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": ODD, "c": True}}
FUNCTION = {"name": "add", "parameters": SCHEMA}
USER: Any = [{"role": "user", "content": "?"}]
SEEDS = range(400)


def turn_of(seed: int) -> tuple[str, CallFormat, bool]:
    random = Random(seed)
    text = "".join(random.choices(PIECES, k=random.randrange(10)))
    return text, random.choice([CallFormat.HERMES, CallFormat.JSON, CallFormat.TAGS]), random.random() < 0.3


def given_back(api: Any, asked: Asked, said: Said) -> Asked:
    """What is read of a history whose second message is a reply."""
    reply = json.loads(json.dumps(api.reply(asked, [said], reply_id="resp_1", created=1)))
    if isinstance(api, OpenAIResponses):
        return api.read({"input": [*USER, *reply["output"], *USER]})
    if isinstance(api, OpenAIChat):
        return api.read({"messages": [*USER, reply["choices"][0]["message"], *USER]})
    turn = {"role": "assistant", "content": reply["content"]}
    return AnthropicMessages().read({"messages": [*USER, turn, *USER], "max_tokens": 1})


BODIES: list[tuple[Any, dict[str, Any]]] = [
    (OpenAIChat(), {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]}),
    (
        OpenAIResponses(),
        {"input": USER, "tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "patch"}]},
    ),
    (
        AnthropicMessages(),
        {
            **{"messages": USER, "max_tokens": 9, "thinking": {"type": "adaptive"}},
            "tools": [{"name": "add", "input_schema": SCHEMA}],
        },
    ),
]


@pytest.mark.parametrize(("api", "body"), BODIES, ids=lambda each: type(each).__name__)
def test_any_turn_given_back_is_what_was_told(saying: Any, api: Any, body: Any) -> None:
    asked = api.read(body)
    for seed in SEEDS:
        text, call_format, in_thought = turn_of(seed)
        said = saying(text, asked, call_format=call_format, in_thought=in_thought)
        told = given_back(api, asked, said).messages
        silent = {"role": "assistant", "content": ""}
        expected = [*USER, said.message(), *USER]
        if isinstance(api, OpenAIResponses):
            expected = [message for message in expected if message != silent]
        assert list(told) == expected, (seed, text)
        json.dumps(said.message(), ensure_ascii=False).encode()


@pytest.mark.parametrize(("api", "body"), BODIES, ids=lambda each: type(each).__name__)
def test_any_turn_is_told_in_a_stream_as_far_as_it_is_settled(saying: Any, api: Any, body: Any) -> None:
    asked = api.read({**body, "stream": True})
    for seed in SEEDS:
        text, call_format, in_thought = turn_of(seed)
        said = saying(text, asked, call_format=call_format, in_thought=in_thought)
        events = api.events(asked, reply_id="resp_1", created=1)
        stream = events.opening()
        openings = call_openings(asked, call_format)
        before = ("", "")
        for size in range(len(text) + 1):
            so_far = said_so_far(text[:size], openings, in_thought=in_thought)
            assert so_far[0].startswith(before[0]), (seed, text)
            assert so_far[1].startswith(before[1]), (seed, text)
            stream += events.progress(0, *so_far)
            before = so_far
        stream += b"".join(stream_of(events, [said]))
        assert told_in(stream) == (said.reasoning, said.content, [call.arguments for call in said.calls]), (seed, text)


def told_in(stream: bytes) -> tuple[str, str, list[Any]]:
    """Thought, text and arguments of calls, put together from the deltas of a stream of any of the APIs."""
    thought, text, calls = "", "", dict[Any, str]()
    for line in stream.decode().split("\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        kind, place = event.get("type", ""), event.get("index", event.get("output_index"))
        delta = event.get("delta")
        if kind == "response.reasoning_text.delta":
            thought += delta
        elif kind == "response.output_text.delta":
            text += delta
        elif kind == "response.function_call_arguments.delta":
            calls[place] = calls.get(place, "") + delta
        elif kind == "response.custom_tool_call_input.delta":
            calls[place] = json.dumps({"input": delta})
        elif kind == "content_block_delta":
            thought += delta.get("thinking", "")
            text += delta.get("text", "")
            if "partial_json" in delta:
                calls[place] = calls.get(place, "") + delta["partial_json"]
        for choice in event.get("choices", ()):
            thought += choice["delta"].get("reasoning_content", "")
            text += choice["delta"].get("content", "")
            for call in choice["delta"].get("tool_calls", ()):
                calls[call["index"]] = calls.get(call["index"], "") + call["function"]["arguments"]
    return thought, text, [json.loads(arguments) for _, arguments in sorted(calls.items())]
