"""Agents' clients talk to the embedded engine's server: tools, thoughts, streams and errors, in each API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
USER: Any = [{"role": "user", "content": "1 + 2?"}]
CALLS = [("call00000", {"a": 1}), ("call00001", {"a": 2})]
THINKING: Any = {"chat_template_kwargs": {"enable_thinking": True}}


class Clients:
    """Both clients of a server."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.openai = openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=server.address, api_key="none", max_retries=0)


@pytest.fixture
def speaking(serving: Any, speaking_checkpoint: Path) -> Callable[..., AbstractAsyncContextManager[Clients]]:
    """A server whose model calls the tool ``add`` twice, and says what the tool has answered."""

    @asynccontextmanager
    async def start(**options: Any) -> AsyncIterator[Clients]:
        async with serving(checkpoint=speaking_checkpoint, **{"context_length": 1024, **options}) as server:
            clients = Clients(server)
            async with clients.openai, clients.anthropic:
                yield clients

    return start


async def test_a_chat_with_tools_is_the_same_whole_and_streamed(speaking: Any) -> None:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    async with speaking() as clients:
        ask = clients.openai.chat.completions
        asked: Any = {"model": "m", "messages": USER, "tools": tools, "temperature": 0.0, "extra_body": THINKING}
        whole = await ask.create(logprobs=True, top_logprobs=2, **asked)
        async with ask.stream(stream_options={"include_usage": True}, logprobs=True, top_logprobs=2, **asked) as stream:
            streamed = await stream.get_final_completion()
        plain = await ask.create(logprobs=True, **asked)
        first = whole.choices[0].message
        history: Any = [*USER, first.model_dump(exclude_none=True) | {"content": first.content}]
        history += [{"role": "tool", "tool_call_id": call_id, "content": "3"} for call_id, _ in CALLS]
        last = await ask.create(**{**asked, "messages": history})
    for reply in (whole, streamed):
        message = reply.choices[0].message
        assert message.reasoning_content == "hm, hm"
        assert message.content == "Let me see."
        assert [(call.id, json.loads(call.function.arguments)) for call in message.tool_calls] == CALLS
        assert reply.choices[0].finish_reason == "tool_calls"
        tokens = reply.choices[0].logprobs.content
        assert len(tokens) == reply.usage.completion_tokens == 12
        for token in tokens:  # at temperature 0 the sampled one is the likeliest
            likeliest, second = token.top_logprobs
            assert (likeliest.token, likeliest.bytes) == (token.token, token.bytes)
            assert likeliest.logprob == pytest.approx(token.logprob, abs=1e-5)
            assert second.logprob <= likeliest.logprob
            assert second.token != likeliest.token
    assert all(token.top_logprobs == [] for token in plain.choices[0].logprobs.content)
    assert last.choices[0].message.content == "It is 3."
    assert last.choices[0].finish_reason == "stop"


async def test_a_stream_tells_text_at_once_and_holds_back_what_may_be_a_call(speaking: Any) -> None:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    async with speaking() as clients:
        ask = clients.openai.chat.completions
        asked: Any = {"model": "m", "messages": USER, "temperature": 0.0, "stream": True, "extra_body": THINKING}
        texts = []
        for more in ({"tools": tools}, {"tools": tools, "tool_choice": "none"}, {}):
            chunks = [chunk async for chunk in await ask.create(**asked, **more)]
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    assert texts[0] == "Let me see."
    assert texts[1] == texts[2]
    assert texts[1].startswith("Let me see.\n<tool_call>")


async def test_a_response_with_tools_is_the_same_whole_and_streamed(speaking: Any) -> None:
    tools: Any = [{"type": "function", **FUNCTION}, {"type": "web_search"}]
    async with speaking() as clients:
        ask = clients.openai.responses
        asked: Any = {"model": "m", "input": USER, "tools": tools, "temperature": 0.0, "extra_body": THINKING}
        raw = await ask.with_raw_response.create(**asked)
        whole = raw.parse()
        async with ask.stream(**asked) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        outputs: Any = [{"type": "function_call_output", "call_id": call_id, "output": "3"} for call_id, _ in CALLS]
        last = await ask.create(**{**asked, "input": [*USER, *whole.output, *outputs]})
        with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
            await ask.create(**asked, previous_response_id=whole.id)
    assert raw.headers["x-rollfeed-left-out"] == "tools[1] (web_search)"
    for response in (whole, streamed):
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        assert response.output_text == "Let me see."
        assert [(item.call_id, json.loads(item.arguments)) for item in response.output[2:]] == CALLS
        assert response.usage.output_tokens == 12
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (last.output_text, last.status) == ("It is 3.", "completed")


async def test_messages_with_tools_are_the_same_whole_and_streamed(speaking: Any) -> None:
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    async with speaking() as clients:
        ask = clients.anthropic.messages
        asked: Any = {"model": "m", "messages": USER, "tools": tools, "max_tokens": 20_000}
        asked |= {
            "extra_body": {**THINKING, "temperature": 0.0},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        whole = await ask.create(**asked)
        async with ask.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        results: Any = [{"type": "tool_result", "tool_use_id": call_id, "content": "3"} for call_id, _ in CALLS]
        answered: Any = [*USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
        last = await ask.create(**{**asked, "messages": answered})
        counted = await ask.count_tokens(model="m", messages=USER, tools=tools, extra_body=THINKING)
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [(block.id, block.input) for block in message.content[2:]] == CALLS
        assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", 12)
        usage = message.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert last.content[-1].text == "It is 3."
    assert last.stop_reason == "end_turn"


async def test_refusals_have_the_form_of_their_api(speaking: Any) -> None:
    image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    long: Any = [{"role": "user", "content": "x" * 5000}]
    async with speaking(context_length=256) as clients:
        ask = clients.openai.responses
        with pytest.raises(openai.BadRequestError, match="the model that is served takes text only"):
            await ask.create(model="m", input=image)
        with pytest.raises(openai.BadRequestError) as refused:
            await ask.create(model="m", input=long)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as refused:
            await clients.openai.chat.completions.create(model="m", messages=long, stream=True)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await clients.anthropic.messages.create(model="m", messages=long, max_tokens=9)
        with pytest.raises(anthropic.BadRequestError, match="a picture without a URL"):
            await clients.anthropic.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]
            )
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):
            async with clients.server.session.post(clients.server.address + path, data=b"{") as response:
                assert response.status == 400
                assert "the body is not JSON" in (await response.json())["error"]["message"]


async def test_a_full_queue_is_a_rate_limit_in_each_api(speaking: Any) -> None:
    asked: Any = {"model": "m", "temperature": 0.0}
    async with speaking(num_slots=1, max_waiting=0) as clients:
        service = clients.server.service
        await service.pause("in_place")
        async with clients.server.session.post(
            clients.server.address + "/v1/chat/completions",
            json={"messages": USER, "stream": True, "temperature": 0.0},
        ) as first:
            with pytest.raises(openai.RateLimitError):
                await clients.openai.chat.completions.create(messages=USER, **asked)
            with pytest.raises(openai.RateLimitError):
                await clients.openai.responses.create(input="?", **asked)
            with pytest.raises(anthropic.RateLimitError):
                await clients.anthropic.messages.create(model="m", messages=USER, max_tokens=9)
            await service.resume()
            assert "[DONE]" in await first.text()


async def test_a_client_that_leaves_aborts_its_answer_in_each_api(speaking: Any) -> None:
    async with speaking() as clients:
        server = clients.server
        await server.service.pause("in_place")
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            body = {"messages": USER, "input": "?", "max_tokens": 9, "stream": True}
            async with server.session.post(server.address + path, json=body) as response:
                assert await response.content.readany()
                response.close()
        while server.service.usage().num_waiting:
            await server.get("/v1/loads")
        await server.service.resume()
        await server.until_idle()
        assert server.service.counters.requests_by_reason["abort"] == 3
