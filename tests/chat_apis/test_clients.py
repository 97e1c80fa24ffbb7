"""The PyPI ``openai`` and ``anthropic`` clients talk to a server of the three APIs."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from rollfeed.base.serving import serve_application
from rollfeed.chat_apis import AnthropicMessages, ApiError, ChatApi, ErrorKind, OpenAIChat, OpenAIResponses, stream_of
from rollfeed.types import FinishKind, FinishReason

APIS: list[ChatApi] = [OpenAIChat(), OpenAIResponses(), AnthropicMessages()]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER: Any = [{"role": "user", "content": "?"}]
FINISHES = {"cut": FinishReason(FinishKind.LENGTH), "END": FinishReason(FinishKind.STOP, "END")}


class Clients:
    """Both clients, and what the server does."""

    def __init__(self, address: str, stack: list[Any]) -> None:
        self.openai = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=address, api_key="k", max_retries=0)
        self.asked = stack
        """Requests as they were read."""

    async def chat(self, **more: Any) -> Any:
        return await self.openai.chat.completions.create(model="m", messages=USER, **more)

    async def respond(self, **more: Any) -> Any:
        return await self.openai.responses.create(**{"model": "m", "input": "?", **more})

    async def message(self, **more: Any) -> Any:
        return await self.anthropic.messages.create(**{"model": "m", "messages": USER, "max_tokens": 99, **more})


@pytest.fixture
def talking(saying: Any) -> Callable[[str], Any]:
    """A server where the policy always says the same, says one text after the other, or fails with an error."""

    @asynccontextmanager
    async def start(
        texts: str | list[str], *, error: ErrorKind | None = None, fails_late: bool = False
    ) -> AsyncIterator[Clients]:
        seen: list[Any] = []
        left = [] if isinstance(texts, str) else list(texts)

        def handler(api: ChatApi) -> Any:
            async def handle(request: web.Request) -> web.StreamResponse:
                try:
                    asked = api.read(await request.json())
                    if asked.previous_response_id is not None:
                        raise ApiError("it is not kept", kind=ErrorKind.NOT_FOUND, param="previous_response_id")
                    seen.append(asked)
                    if error is not None and not fails_late:
                        raise ApiError("this went wrong", kind=error, param="model")
                except ApiError as refusal:
                    status, body = api.error(refusal)
                    return web.json_response(body, status=status)
                text = texts if isinstance(texts, str) else left.pop(0)
                finish = next((reason for end, reason in FINISHES.items() if text.endswith(end)), None)
                said, reply_id, created = saying(text, asked, finish=finish), api.new_id(), int(time.time())
                if not asked.stream:
                    return web.json_response(api.reply(asked, [said], reply_id=reply_id, created=created))
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                events = api.events(asked, reply_id=reply_id, created=created)
                await response.write(events.opening() + events.ping())
                if error is not None:
                    await response.write(events.failure(ApiError("this went wrong", kind=error)))
                    return response
                await response.write(events.progress(0, said.reasoning[:1], ""))
                for piece in stream_of(events, [said]):
                    await response.write(piece)
                return response

            return handle

        application = web.Application()
        application.add_routes([web.post(api.path, handler(api)) for api in APIS])
        async with serve_application(application, host="127.0.0.1", port=0) as address, AsyncExitStack() as stack:
            clients = Clients(address, seen)
            await stack.enter_async_context(clients.openai)
            await stack.enter_async_context(clients.anthropic)
            yield clients

    return start


THOUGHT = f"<think>\nhm, {'long ' * 400}</think>\n\nLet me see.\n{CALL}\n{CALL}"


async def test_a_chat_is_told_whole_and_streamed(talking: Any) -> None:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    async with talking(THOUGHT) as clients:
        whole = (await clients.chat(tools=tools)).choices[0]
        async with clients.openai.chat.completions.stream(model="m", messages=USER, tools=tools) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
    assert whole.message.content == streamed.message.content == "Let me see."
    assert whole.message.reasoning_content.startswith("hm, long")
    for choice in (whole, streamed):
        assert [call.id for call in choice.message.tool_calls] == ["call00000", "call00001"]
        assert {(call.function.name, call.function.arguments) for call in choice.message.tool_calls} == {
            ("add", '{"a": 1}')
        }
        assert choice.finish_reason == "tool_calls"


async def test_a_response_is_told_whole_and_streamed_in_the_order_that_agents_want(talking: Any) -> None:
    tools: Any = [
        {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False},
        {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}},
        {"type": "web_search"},
    ]
    custom = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin\\n"}}</tool_call>'
    async with talking(THOUGHT + custom) as clients:
        whole = await clients.respond(tools=tools)
        events = [event async for event in await clients.respond(tools=tools, stream=True)]
        async with clients.openai.responses.stream(model="m", input="?", tools=tools) as stream:
            accumulated = await stream.get_final_response()
    assert clients.asked[0].left_out == ("tools[2] (web_search)",)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    kinds = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]
    added, part, done = "output_item.added", "content_part", "output_item.done"
    arguments, text = "function_call_arguments", "custom_tool_call_input"
    assert kinds == [
        *("created", "in_progress"),
        *(added, f"{part}.added", "reasoning_text.delta", "reasoning_text.done", f"{part}.done", done),
        *(added, f"{part}.added", "output_text.delta", "output_text.done", f"{part}.done", done),
        *(added, f"{arguments}.delta", f"{arguments}.done", done) * 2,
        *(added, f"{text}.delta", f"{text}.done", done),
        "completed",
    ]
    items = [event.item for event in events if event.type == "response.output_item.done"]
    for response in (whole, events[-1].response, accumulated):
        assert [item.type for item in response.output] == [item.type for item in items]
        assert response.output_text == "Let me see."
        assert response.output[-1].input == "*** Begin\n"
        assert response.output[2].arguments == '{"a": 1}'
        assert response.usage.input_tokens == 11
        assert response.usage.input_tokens_details.cached_tokens == 4
    assert items == events[-1].response.output
    places = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert places == list(range(len(items)))


async def test_a_message_is_told_whole_and_streamed(talking: Any) -> None:
    more: Any = {
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    async with talking(THOUGHT) as clients:
        whole = await clients.message(**more)
        async with clients.anthropic.messages.stream(model="m", messages=USER, max_tokens=99, **more) as stream:
            streamed = await stream.get_final_message()
        silent = await clients.message(tools=more["tools"])
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert message.content[0].thinking.startswith("hm, long")
        assert message.content[0].signature
        assert message.content[1].text == "Let me see."
        assert [block.input for block in message.content[2:]] == [{"a": 1}] * 2
        assert message.stop_reason == "tool_use"
        assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (7, 4)
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    assert silent.content[0].type == "text", "thoughts are told to those who asked for them"


@pytest.mark.parametrize(
    ("text", "chat", "response", "message"),
    [
        ("done", "stop", ("completed", None), ("end_turn", None)),
        ("is cut", "length", ("incomplete", "max_output_tokens"), ("max_tokens", None)),
        ("until END", "stop", ("completed", None), ("stop_sequence", "END")),
        ("", "stop", ("completed", None), ("end_turn", None)),
    ],
)
async def test_each_api_says_why_a_turn_ended(talking: Any, text: str, chat: str, response: Any, message: Any) -> None:
    async with talking(text) as clients:
        for stream in (False, True):
            chatted = await clients.chat(stream=stream)
            responded = await clients.respond(stream=stream)
            if stream:
                chatted = [chunk async for chunk in chatted][-1]
                responded = [event async for event in responded][-1].response
                async with clients.anthropic.messages.stream(model="m", messages=USER, max_tokens=9) as events:
                    told = await events.get_final_message()
            else:
                told = await clients.message()
            assert chatted.choices[0].finish_reason == chat
            why = responded.incomplete_details.reason if responded.incomplete_details else None
            assert (responded.status, why) == response
            assert (told.stop_reason, told.stop_sequence) == message
            assert told.content[0].text == responded.output_text == text.removesuffix("END")


ERRORS = [
    (ErrorKind.INVALID_REQUEST, "BadRequestError", "BadRequestError"),
    (ErrorKind.AUTHENTICATION, "AuthenticationError", "AuthenticationError"),
    (ErrorKind.PERMISSION, "PermissionDeniedError", "PermissionDeniedError"),
    (ErrorKind.NOT_FOUND, "NotFoundError", "NotFoundError"),
    (ErrorKind.TOO_LARGE, "APIStatusError", "ContentTooLargeError"),
    (ErrorKind.RATE_LIMIT, "RateLimitError", "RateLimitError"),
    (ErrorKind.OVERLOADED, "InternalServerError", "OverloadedError"),
    (ErrorKind.API_ERROR, "InternalServerError", "InternalServerError"),
]


@pytest.mark.parametrize(("kind", "of_openai", "of_anthropic"), ERRORS)
async def test_errors_are_the_clients_own(talking: Any, kind: ErrorKind, of_openai: str, of_anthropic: str) -> None:
    async with talking("", error=kind) as clients:
        for ask, module, name in (
            (clients.chat, openai, of_openai),
            (clients.respond, openai, of_openai),
            (clients.message, anthropic, of_anthropic),
        ):
            with pytest.raises(module.APIStatusError, match="this went wrong") as caught:
                await ask()
            assert type(caught.value).__name__ == name
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["type"] == "error"


async def test_a_failure_in_a_stream_reaches_the_client(talking: Any) -> None:
    async with talking("", error=ErrorKind.OVERLOADED, fails_late=True) as clients:
        with pytest.raises(openai.APIError, match="this went wrong"):
            _ = [chunk async for chunk in await clients.chat(stream=True)]
        with pytest.raises(anthropic.APIStatusError, match="this went wrong"):
            _ = [event async for event in await clients.message(stream=True)]
        last = [event async for event in await clients.respond(stream=True)][-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "this went wrong"


@pytest.mark.parametrize("text", ["plain ", f"<think>hm</think>\nSee.\n{CALL}{CALL}", CALL, "<think>hm</think>4"])
async def test_a_turn_given_back_as_clients_do_is_the_turn_that_was_said(talking: Any, saying: Any, text: str) -> None:
    function = {"name": "add", "parameters": SCHEMA}
    async with talking(text) as clients:
        reply = (await clients.chat(tools=[{"type": "function", "function": function}])).choices[0].message
        history: Any = [*USER, json.loads(reply.model_dump_json(exclude_none=False)), *USER]
        await clients.openai.chat.completions.create(model="m", messages=history)
        response = await clients.respond(tools=[{"type": "function", **function}])
        await clients.respond(input=[*USER, *response.output, *USER])
        message = await clients.message(
            tools=[{"name": "add", "input_schema": SCHEMA}], thinking={"type": "enabled", "budget_tokens": 1024}
        )
        await clients.message(messages=[*USER, {"role": "assistant", "content": message.content}, *USER])
    said = saying(text, clients.asked[0]).message()
    for asked in clients.asked[1::2]:
        assert asked.messages == (USER[0], said, USER[0])


async def test_the_tool_runner_of_anthropic_sends_all_of_a_thread_that_is_not_kept(talking: Any) -> None:
    @anthropic.beta_async_tool
    async def add(a: int) -> str:
        """Add one to a number."""
        return str(a + 1)

    async with talking([CALL, "It is 2."]) as clients:
        runner = clients.anthropic.beta.messages.tool_runner(model="m", max_tokens=9, messages=USER, tools=[add])
        last = await runner.until_done()
    assert last.content[0].text == "It is 2."
    first, second = clients.asked
    assert [message["role"] for message in second.messages] == ["user", "assistant", "tool"]
    assert second.messages[-1]["content"] == "2"
    assert first.tools == second.tools


async def test_calls_of_tools_in_a_namespace_name_it(talking: Any) -> None:
    tool: Any = {
        "type": "namespace",
        "name": "sums",
        "description": "d",
        "tools": [{"type": "function", "name": "add"}],
    }
    async with talking(CALL) as clients:
        response = await clients.respond(tools=[tool])
    assert (response.output[0].name, response.output[0].namespace) == ("add", "sums")
