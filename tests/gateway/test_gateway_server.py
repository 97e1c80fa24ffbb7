"""The gateway as agents and operators see it, over a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from tests.gateway.clients import gateway, said

from rollfeed.testing import CharTokenizer, ScriptedEngine

QUESTION = {"role": "user", "content": "a"}


def answers(*texts: str) -> ScriptedEngine:
    """Return an engine that says texts in turn."""
    left = list(texts)
    return ScriptedEngine(answer=lambda _: left.pop(0))


def test_a_session_becomes_the_tokens_that_its_engine_was_sent_and_sampled() -> None:
    async def run() -> None:
        engine = answers("one", "two")
        async with gateway(engine) as client:
            opened = await client.open(metadata={"task": 7}, label="x")
            first = await client.chat(opened, [QUESTION], model="policy")
            assert said(first) == "one"
            told = [QUESTION, {"role": "assistant", "content": "one"}, {"role": "user", "content": "b"}]
            assert said(await client.chat(opened, told)) == "two"
            (sample,) = await client.finish(opened, reward=0.5)
            assert (sample["reward"], sample["label"], sample["metadata"]["task"]) == (0.5, "x", 7)
            assert sample["metadata"]["num_turns"] == 2
            last = engine.requests[-1].token_ids.tolist()
            end = CharTokenizer().encode("two", add_special_tokens=False).tolist()
            assert sample["token_ids"] == [*last, *end, 3]
            trained = np.array(sample["token_ids"][-sample["response_length"] :])[np.array(sample["loss_mask"]) > 0]
            assert "".join(map(chr, trained)) == "one\3two\3"
            status, _ = await client.operate("GET", f"/sessions/{opened['id']}")
            assert status == 404
            assert await client.finish(opened) == [sample]

    asyncio.run(run())


def test_a_stream_tells_the_same_as_a_reply() -> None:
    async def run() -> None:
        async with gateway(answers("one two", "one two")) as client:
            opened = await client.open()
            url, body = f"{opened['openai_base_url']}/chat/completions", {"messages": [QUESTION], "stream": True}
            async with client.http.post(url, json=body) as response:
                told = (await response.read()).decode()
            assert told.rstrip().endswith("data: [DONE]")
            assert '"content":"one two"' in told
            assert (await client.operate("GET", f"/sessions/{opened['id']}"))[1]["num_turns"] == 1

    asyncio.run(run())


def test_the_likeliest_tokens_are_not_told_and_that_is_said() -> None:
    async def run() -> None:
        async with gateway(answers("one")) as client:
            opened = await client.open()
            body = {"messages": [QUESTION], "logprobs": True, "top_logprobs": 2}
            async with client.http.post(f"{opened['openai_base_url']}/chat/completions", json=body) as response:
                assert response.headers["x-rollfeed-left-out"] == "top_logprobs"
                tokens = (await response.json())["choices"][0]["logprobs"]["content"]
            assert [token["top_logprobs"] for token in tokens] == [[], [], [], []]

    asyncio.run(run())


def test_all_three_apis_are_turns_of_the_same_session() -> None:
    async def run() -> None:
        async with gateway(answers("one", "two", "three")) as client:
            opened = await client.open()
            base = opened["anthropic_base_url"]
            bodies = {
                "/v1/chat/completions": {"messages": [QUESTION]},
                "/v1/responses": {
                    "input": [QUESTION, {"role": "assistant", "content": "one"}, {"role": "user", "content": "b"}]
                },
                "/v1/messages": {
                    "max_tokens": 9,
                    "messages": [
                        QUESTION,
                        {"role": "assistant", "content": "one"},
                        {"role": "user", "content": "b"},
                        {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
                        {"role": "user", "content": "c"},
                    ],
                },
            }
            for path, body in bodies.items():
                async with client.http.post(base + path, json={"model": "policy", **body}) as response:
                    assert response.status == 200, await response.text()
            async with client.http.post(base + "/v1/messages/count_tokens", json=bodies["/v1/messages"]) as response:
                assert (await response.json())["input_tokens"] == len(client.engine.requests[-1].token_ids)
            (sample,) = await client.finish(opened)
            assert sum(sample["loss_mask"]) == len("one\3two\3three\3")

    asyncio.run(run())


def test_models_are_listed_to_who_has_a_key() -> None:
    async def run() -> None:
        async with gateway() as client:
            opened = await client.open()
            async with client.http.get(f"{opened['openai_base_url']}/models") as response:
                listed: Any = await response.json()
            assert [each["id"] for each in listed["data"]] == ["policy"]
            async with client.http.get(f"{client.address}/v1/models") as response:
                assert response.status == 401

    asyncio.run(run())
