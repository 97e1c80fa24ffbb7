"""The PyPI ``openai`` client talks to the server."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

JSON = {"Content-Type": "application/json"}
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
GREEDY: Any = {"model": "tiny", "temperature": 0.0, "extra_body": {"ignore_eos": True}}


@asynccontextmanager
async def connected(client: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=client.address + "/v1", api_key="none", max_retries=0) as connection:
        yield connection


async def test_it_completes(serving: Any) -> None:
    async with serving() as client, connected(client) as connection:
        reply = await connection.completions.create(prompt="Hello", max_tokens=5, logprobs=0, **GREEDY)
        ids = await connection.completions.create(prompt=[72, 101], max_tokens=2, n=2, **GREEDY)
        expected = await client.post(
            "/generate",
            {"text": "Hello", "sampling_params": {"max_new_tokens": 5, "temperature": 0.0, "ignore_eos": True}},
        )
    choice = reply.choices[0]
    assert choice.text == expected["text"]
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert len(choice.logprobs.token_logprobs or []) == len(choice.logprobs.tokens or []) == 5
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (5, 5, 10)
    assert [choice.index for choice in ids.choices] == [0, 1]
    assert ids.usage is not None
    assert (ids.usage.prompt_tokens, ids.usage.completion_tokens) == (2, 4)


async def test_a_list_of_prompts_gives_choices_in_order(serving: Any) -> None:
    async with serving() as client, connected(client) as connection:
        prompts = ["Hello", "World"]
        together = await connection.completions.create(prompt=prompts, max_tokens=4, **GREEDY)
        alone = [await connection.completions.create(prompt=prompt, max_tokens=4, **GREEDY) for prompt in prompts]
    assert [choice.text for choice in together.choices] == [reply.choices[0].text for reply in alone]


async def test_it_chats_whole_and_streamed(serving: Any) -> None:
    async with serving() as client, connected(client) as connection:
        whole = await connection.chat.completions.create(
            messages=MESSAGES, max_completion_tokens=9, logprobs=True, **GREEDY
        )
        stream = await connection.chat.completions.create(
            messages=MESSAGES, max_tokens=9, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        chunks = [chunk async for chunk in stream]
        model = (await connection.models.list()).data[0]
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert choice.logprobs is not None
    assert len(choice.logprobs.content or []) == 9
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert model.id == whole.model == "tiny"


async def test_a_streamed_completion_is_the_whole_one_with_each_logprob_once(serving: Any) -> None:
    async with serving() as client, connected(client) as connection:
        whole = await connection.completions.create(prompt="Hello", max_tokens=30, logprobs=0, **GREEDY)
        stream = await connection.completions.create(prompt="Hello", max_tokens=30, logprobs=0, stream=True, **GREEDY)
        choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens or []]
    assert whole.choices[0].logprobs is not None
    assert tokens == whole.choices[0].logprobs.tokens


async def test_a_chat_ends_at_the_context_when_no_limit_is_given(serving: Any) -> None:
    async with serving(context_length=64) as client, connected(client) as connection:
        reply = await connection.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert reply.usage is not None
    assert reply.usage.total_tokens == 64


async def test_messages_of_a_chat_are_prepared_for_the_template(
    serving: Any, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{{ tone }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " 1+1?"}]
    messages: Any = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    extra = {**GREEDY["extra_body"], "chat_template_kwargs": {"tone": "kind"}}
    expected = 'kind<user>What is 1+1?<assistant>{"a": 1}<tool>2'
    async with serving(tokenizer_folder=tmp_path / "model") as client, connected(client) as connection:
        reply = await connection.chat.completions.create(
            messages=messages, max_tokens=1, **{**GREEDY, "extra_body": extra}
        )
        extra["chat_template_kwargs"] = [1]
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs must be an object"):
            await connection.chat.completions.create(messages=MESSAGES, **{**GREEDY, "extra_body": extra})
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(expected)


async def test_half_of_a_surrogate_pair_in_a_body_is_named(serving: Any) -> None:
    async with serving() as client:
        reply = await client.session.post(
            client.address + "/v1/completions", data=b'{"prompt": "cut \\ud83d here"}', headers=JSON
        )
        assert reply.status == 400
        assert "half of a surrogate pair" in (await reply.json())["message"]
        whole = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}'
        reply = await client.session.post(client.address + "/v1/completions", data=whole, headers=JSON)
        assert reply.status == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [], "model": "tiny"}, "messages must be a list"),
        ({"messages": MESSAGES, "model": "tiny", "tools": [{"type": "function"}]}, "has no name"),
        ({"messages": MESSAGES, "model": "tiny", "min_p": 0.1}, "min_p is not supported"),
        ({"messages": MESSAGES, "model": "tiny", "max_tokens": 10_000}, "maximum context length of 256 tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "model": "tiny"},
            "is a picture without a URL",
        ),
    ],
)
async def test_errors_reach_the_client_as_bad_requests(serving: Any, body: Any, message: str) -> None:
    async with serving() as client, connected(client) as connection:
        with pytest.raises(openai.BadRequestError, match=message):
            await connection.post("/chat/completions", body=body, cast_to=object)
