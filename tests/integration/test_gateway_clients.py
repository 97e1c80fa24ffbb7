"""Clients of openai and anthropic through a gateway: the samples are what the engine sampled, bit for bit."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from openai import AsyncOpenAI

from rollfeed import app
from rollfeed.benchmarks.gateway.fake_policy import read_sampled
from rollfeed.benchmarks.gateway.gateway_processes import ENGINE, GatewayProcess, serving, write_model
from rollfeed.benchmarks.gateway.sampled_once import compare
from rollfeed.benchmarks.gateway.talks import TOOL

PARAMETERS = {"type": "object", "properties": {"number": {"type": "integer"}, "why": {"type": "string"}}}
ABOUT = "Returns a part."
SYSTEM = "Read the parts."
_PATIENCE_SECONDS = 120.0
Turn = Callable[[list[Any], bool], Awaitable[list[Any]]]
"""Asks for the next turn of a history, and returns what the client makes of it and of its calls."""


def answer(number: int) -> str:
    return f"Part {number}."


def chat(client: AsyncOpenAI) -> Turn:
    function = {"name": TOOL, "description": ABOUT, "parameters": PARAMETERS}
    asked = {"model": "policy", "tools": [{"type": "function", "function": function}]}

    async def turn(history: list[Any], stream: bool) -> list[Any]:
        messages = [{"role": "system", "content": SYSTEM}, *history]
        if stream:
            async with client.chat.completions.stream(messages=messages, **asked) as events:
                completion = await events.get_final_completion()
        else:
            completion = await client.chat.completions.create(messages=messages, **asked)
        message = completion.choices[0].message
        assert completion.choices[0].finish_reason == "tool_calls"
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": answer(json.loads(call.function.arguments)["number"])}
            for call in message.tool_calls
        ]
        return [message, *results]

    return turn


def responses(client: AsyncOpenAI) -> Turn:
    tool = {"type": "function", "name": TOOL, "description": ABOUT, "parameters": PARAMETERS, "strict": False}
    asked = {"model": "policy", "tools": [tool], "instructions": SYSTEM}

    async def turn(history: list[Any], stream: bool) -> list[Any]:
        if stream:
            async with client.responses.stream(input=history, **asked) as events:
                response = await events.get_final_response()
        else:
            response = await client.responses.create(input=history, **asked)
        calls = [item for item in response.output if item.type == "function_call"]
        results = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": answer(json.loads(call.arguments)["number"]),
            }
            for call in calls
        ]
        assert calls
        return [*(item.model_dump(exclude={"parsed", "parsed_arguments"}) for item in response.output), *results]

    return turn


def messages(client: AsyncAnthropic) -> Turn:
    tool = {"name": TOOL, "description": ABOUT, "input_schema": PARAMETERS}
    asked = {"model": "policy", "max_tokens": 2000, "system": SYSTEM, "tools": [tool]}

    async def turn(history: list[Any], stream: bool) -> list[Any]:
        if stream:
            async with client.messages.stream(messages=history, **asked) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(messages=history, **asked)
        assert message.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": answer(block.input["number"])}
            for block in message.content
            if block.type == "tool_use"
        ]
        return [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]

    return turn


async def hold_sessions(gateway: GatewayProcess, *, num_sessions: int, num_turns: int) -> None:
    permits = asyncio.Semaphore(16)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.address, timeout=_PATIENCE_SECONDS))
        openai = await stack.enter_async_context(AsyncOpenAI(base_url=f"{gateway.address}/v1", api_key="none"))
        anthropic = await stack.enter_async_context(AsyncAnthropic(base_url=gateway.address, api_key="none"))

        async def hold(number: int) -> None:
            async with permits:
                opened = (await http.post("/sessions", json={})).raise_for_status().json()
                key = opened["key"]
                kinds = (
                    lambda: chat(openai.with_options(api_key=key)),
                    lambda: responses(openai.with_options(api_key=key)),
                    lambda: messages(anthropic.with_options(api_key=key)),
                )
                turn = kinds[number % len(kinds)]()
                history: list[Any] = [{"role": "user", "content": f"Question {number}."}]
                for _ in range(num_turns):
                    history += await turn(history, number // len(kinds) % 2 == 0)
                (await http.post(f"/sessions/{opened['id']}/finish", json={})).raise_for_status()

        async with asyncio.TaskGroup() as group:
            for number in range(num_sessions):
                group.create_task(hold(number))


async def hold_kept_histories(gateway: GatewayProcess) -> None:
    """Hold conversations of three turns of which the clients send only what is new."""
    async with httpx.AsyncClient(base_url=gateway.address, timeout=_PATIENCE_SECONDS) as http:
        first, second = [(await http.post("/sessions", json={})).json() for _ in range(2)]

        async def read_part(number: int, why: str = "") -> str:
            """Returns a part."""
            return answer(number)

        async with AsyncAnthropic(base_url=gateway.address, api_key=first["key"]) as anthropic:
            runner = anthropic.beta.messages.tool_runner(
                model="policy",
                max_tokens=2000,
                system=SYSTEM,
                tools=[beta_async_tool(read_part)],
                messages=[{"role": "user", "content": "Question."}],
                max_iterations=3,
            )
            assert [message.stop_reason async for message in runner] == ["tool_use"] * 3
        async with AsyncOpenAI(base_url=f"{gateway.address}/v1", api_key=second["key"]) as openai:
            tool = {"type": "function", "name": TOOL, "description": ABOUT, "parameters": PARAMETERS, "strict": False}
            asked: dict[str, Any] = {"model": "policy", "tools": [tool], "instructions": SYSTEM}
            items: list[Any] = [{"role": "user", "content": "Question."}]
            for _ in range(3):
                response = await openai.responses.create(input=items, **asked)
                asked["previous_response_id"] = response.id
                items = [
                    {
                        "type": "function_call_output",
                        "call_id": item.call_id,
                        "output": answer(json.loads(item.arguments)["number"]),
                    }
                    for item in response.output
                    if item.type == "function_call"
                ]
        for opened in (first, second):
            (await http.post(f"/sessions/{opened['id']}/finish", json={})).raise_for_status()


def check_sessions(
    folder: Path, hold: Callable[[GatewayProcess], Awaitable[None]], *, num_sessions: int, num_turns: int
) -> None:
    write_model(folder / "model", app.load_model(with_weights=False).checkpoint)
    sampled = folder / "sampled.jsonl"
    with (
        serving(ENGINE, [str(folder / "model"), str(sampled), "30", "0"]) as (engine, _),
        GatewayProcess(folder / "gateway", model=folder / "model", engine=engine) as gateway,
    ):
        asyncio.run(hold(gateway))
        found = compare(gateway.samples(), read_sampled(sampled))
    assert (found.num_samples, found.num_trained) == (num_sessions, num_sessions * num_turns)
    assert found.unsampled + found.doubled + found.untrained == []


def test_sessions_of_clients_become_what_was_sampled(tmp_path: Path) -> None:
    hold = partial(hold_sessions, num_sessions=12, num_turns=3)
    check_sessions(tmp_path, hold, num_sessions=12, num_turns=3)


def test_histories_that_clients_leave_to_the_server_become_what_was_sampled(tmp_path: Path) -> None:
    check_sessions(tmp_path, hold_kept_histories, num_sessions=2, num_turns=3)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_thousand_sessions_of_ten_turns_become_what_was_sampled(tmp_path: Path) -> None:
    hold = partial(hold_sessions, num_sessions=2000, num_turns=10)
    check_sessions(tmp_path, hold, num_sessions=2000, num_turns=10)
