from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rollfeed.chat_apis import ApiError, Asked, ErrorKind, OpenAIChat, ToolChoice, stream_of
from rollfeed.types import SamplingParams

API = OpenAIChat()
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_messages_are_read_as_templates_take_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}, "index": 0}
    asked = API.read(
        {
            "model": "m",
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
                {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm", "annotations": []},
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
            ],
            "tools": [TOOL],
        }
    )
    read = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert asked.messages == (
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "", "tool_calls": [read], "reasoning_content": "hm"},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    )
    assert asked.tools == (TOOL,)


def test_sampling_is_the_servers_unless_it_is_said() -> None:
    default = SamplingParams(max_new_tokens=100, temperature=0.7)
    assert API.read(BODY).sampling(default) == default
    said = {"temperature": 0, "top_p": 0.5, "max_tokens": 7, "stop": "END", "seed": 3, "frequency_penalty": 0.0}
    expected = SamplingParams(max_new_tokens=7, temperature=0.0, top_p=0.5, stop=("END",), seed=3)
    assert API.read({**BODY, **said}).sampling(default) == expected
    assert API.read({**BODY, "max_completion_tokens": 10**6}).sampling(default).max_new_tokens == 100
    with pytest.raises(ApiError, match="min_p is not supported"):
        API.read({**BODY, "min_p": 0.1}).sampling(default)


def test_what_is_not_done_is_told() -> None:
    body = {**BODY, "tools": [TOOL, {"type": "web_search"}], "tool_choice": "required", "user": "u", "sparkle": 1}
    asked = API.read(body)
    assert asked.tools == (TOOL,)
    assert asked.left_out == ("tools[1] (web_search)", "tool_choice", "sparkle")


def test_the_likeliest_tokens_are_twenty_at_most_and_told_with_logprobs_only() -> None:
    assert API.read({**BODY, "logprobs": True, "top_logprobs": 20}).num_tops == 20
    without = API.read({**BODY, "top_logprobs": 3})
    assert (without.num_tops, without.left_out) == (0, ("top_logprobs",))
    with pytest.raises(ApiError, match="top_logprobs must be a whole number of at least 0 and at most 20"):
        API.read({**BODY, "logprobs": True, "top_logprobs": 21})
    assert API.read({**BODY, "tools": [TOOL], "tool_choice": "none"}).callable_tools == ()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"stream": 1}, "stream"),
        ({"stop": ["a"] * 1000}, "stop"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
        ({"tools": [{"function": {"name": "x", "parameters": []}}]}, "tools[0].parameters"),
        ({"tools": [{"function": {"name": "x", "parameters": {"properties": []}}}]}, "tools[0].parameters"),
        ({"tools": [{"function": {"name": "x", "parameters": {"required": 3}}}]}, "tools[0].parameters"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_cannot_be_served_is_refused_by_the_name_of_the_field(changes: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        API.read({**BODY, **changes})
    assert caught.value.param == param
    assert caught.value.kind is ErrorKind.INVALID_REQUEST


def test_a_reply_given_back_is_the_turn_that_was_said(saying: Any) -> None:
    asked = API.read({**BODY, "tools": [TOOL]})
    for text in ("plain ", f"<think>hm</think>\nSee.\n{CALL}", CALL):
        said = saying(text, asked)
        reply = API.reply(asked, [said], reply_id="r", created=1)
        message = ChatCompletion.model_validate(reply).choices[0].message.model_dump(exclude_none=True)
        assert (
            API.read({**BODY, "messages": [*BODY["messages"], message | {"content": message.get("content")}]}).messages[
                1
            ]
            == said.message()
        )


def chunks_of(asked: Asked, *said: Any) -> list[ChatCompletionChunk]:
    events = API.events(asked, reply_id="r", created=1)
    stream = events.opening() + events.ping() + b"".join(stream_of(events, said))
    lines = [line.removeprefix("data: ") for line in stream.decode().split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [ChatCompletionChunk.model_validate(json.loads(line)) for line in lines[:-1]]


def test_a_stream_tells_thought_text_calls_reason_and_counts(saying: Any) -> None:
    asked = API.read({**BODY, "tools": [TOOL], "stream_options": {"include_usage": True}, "logprobs": True})
    said = saying(f"<think>hm</think>{'long ' * 500}\n{CALL}{CALL}", asked)
    chunks = chunks_of(asked, said)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == said.content
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    for index, call in enumerate(said.calls):
        assert [each.id for each in calls if each.index == index and each.id] == [call.call_id]
        told = "".join(each.function.arguments or "" for each in calls if each.index == index and each.function)
        assert told == '{"a": 1}'
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 11
    scores = [
        each for chunk in chunks if chunk.choices and (told := chunk.choices[0].logprobs) for each in told.content or ()
    ]
    assert len(scores) == said.completion_tokens


def test_a_stream_of_progress_tells_nothing_twice(saying: Any) -> None:
    asked = API.read({**BODY, "n": 2, "logprobs": True})
    said = saying("abcdef", asked)
    events = API.events(asked, reply_id="r", created=1)
    stream = events.opening()
    for size in (2, 2, 5):
        stream += events.progress(0, "", said.content[:size])
    stream += b"".join(stream_of(events, [said, said]))
    chunks = [json.loads(line[6:]) for line in stream.decode().split("\n") if line.startswith("data: {")]
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "abcdef"
        assert sum(len((choice["logprobs"] or {"content": []})["content"]) for choice in choices) == 7


@pytest.mark.parametrize(
    ("kind", "status"), list(zip(ErrorKind, (400, 401, 403, 404, 413, 429, 503, 500), strict=True))
)
def test_errors_have_the_status_that_clients_look_for(kind: ErrorKind, status: int) -> None:
    told, body = API.error(ApiError("no", kind=kind, param="model"))
    assert told == status
    assert body["error"]["message"] == "no"
    assert body["error"]["param"] == "model"


def test_any_choice_of_tools_is_understood() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for given, expected in ((None, "auto"), ("auto", "auto"), ("none", "none"), (named, "required")):
        assert API.read({**BODY, "tools": [TOOL], "tool_choice": given}).tool_choice is ToolChoice(expected)
