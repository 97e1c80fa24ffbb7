"""Pictures in conversations with the embedded server, by the clients of OpenAI and Anthropic."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from tests.engine.pictures.seeing import png, uri

GREEDY: Any = {"model": "tiny", "temperature": 0.0}
GREEDY_MESSAGES: Any = {"model": "tiny", "extra_body": {"temperature": 0.0}}


class Clients(NamedTuple):
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic


@asynccontextmanager
async def clients_of(address: str) -> AsyncIterator[Clients]:
    about: Any = {"api_key": "none", "max_retries": 0}
    async with (
        openai.AsyncOpenAI(base_url=f"{address}/v1", **about) as first,
        anthropic.AsyncAnthropic(base_url=address, **about) as second,
    ):
        yield Clients(first, second)


def block(seed: int) -> dict[str, Any]:
    data = base64.b64encode(png(seed)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def part(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(png(seed))}}


async def test_a_picture_is_the_same_in_each_api(serving, ask) -> None:
    rendered = ask("<image>red?", 1)
    async with serving() as server, clients_of(server.server) as clients:
        chats = clients.openai.chat.completions
        asked: Any = {**GREEDY, "max_tokens": 3, "logprobs": True}
        shown, other = [
            await chats.create(messages=[{"role": "user", "content": [part(seed), text("red?")]}], **asked)
            for seed in (1, 2)
        ]
        parts: Any = [{"type": "input_image", "image_url": uri(png(1))}, {"type": "input_text", "text": "red?"}]
        answered = await clients.openai.responses.create(
            input=[{"role": "user", "content": parts}], max_output_tokens=3, **GREEDY
        )
        said = await clients.anthropic.messages.create(
            messages=[{"role": "user", "content": [block(1), text("red?")]}], max_tokens=3, **GREEDY_MESSAGES
        )
        counted = await clients.anthropic.messages.count_tokens(
            model="tiny", messages=[{"role": "user", "content": [block(1), text("red?")]}]
        )
    assert shown.usage.prompt_tokens == answered.usage.input_tokens == counted.input_tokens == len(rendered.token_ids)
    assert said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0) == len(rendered.token_ids)
    assert shown.choices[0].message.content == answered.output_text == said.content[0].text
    first, second = (reply.choices[0].logprobs.content[0].logprob for reply in (shown, other))
    assert abs(first - second) > 1e-5


async def test_results_of_tools_have_pictures(serving) -> None:
    call = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    tools: Any = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}]

    def asked(*shown: Any) -> list[Any]:
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": [text("there"), *shown]}
        said = {"role": "assistant", "content": [call]}
        return [{"role": "user", "content": "red?"}, said, {"role": "user", "content": [result, text("so?")]}]

    async with serving(context_length=512) as server, clients_of(server.server) as clients:
        count = clients.anthropic.messages.count_tokens
        without, once, twice = [
            (await count(model="tiny", messages=asked(*map(block, seeds)), tools=tools)).input_tokens
            for seeds in ((), (1,), (1, 2))
        ]
        reply = await clients.anthropic.messages.create(
            messages=asked(block(1)), tools=tools, max_tokens=2, **GREEDY_MESSAGES
        )
    assert twice - once == once - without > 1
    assert reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) == once


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([part(1), {"type": "input_audio", "input_audio": {}}], "is of type input_audio, which is not supported"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "it is no picture in PNG"),
        ([{"type": "image_url", "image_url": {"url": "/etc/passwd"}}], "a picture without a URL"),
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}], "which is no public address"),
        ([{"type": "image", "file_id": "file_1"}], "files are not kept here"),
        ([part(1), text("<image>")], "it has 1 picture and 2 placeholders"),
    ],
)
async def test_what_is_no_picture_is_refused_with_the_reason(serving, content: Any, message: str) -> None:
    async with serving() as server, clients_of(server.server) as clients:
        with pytest.raises(openai.BadRequestError, match=message):
            await clients.openai.chat.completions.create(messages=[{"role": "user", "content": content}], **GREEDY)
