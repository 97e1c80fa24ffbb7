"""Servers that say what cannot be: nothing of it is trained on, and each time is counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rollfeed.completions import check_finish, check_tokens
from rollfeed.config.engine import SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.client.concurrency import memory_room, room_at
from rollfeed.engine.client.versions import version_number
from rollfeed.engine.dialects import SGLang
from rollfeed.engine.dialects.sglang.replies import decode_reply
from rollfeed.engine.http import ControlReply, TryFailedError
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.testing.fake_sglang import Lie, serve_fake_sglang
from rollfeed.types import FinishKind, FinishReason, SamplingParams

PROMPT = np.array([3, 4, 5], np.int32)
LOAD = (
    "num_running_reqs",
    "num_waiting_reqs",
    "gen_throughput",
    "token_usage",
    "queues",
    "num_used_tokens",
    "total_prefill_busy_us",
    "total_prefill_uncached_tokens",
)
EngineAt = Callable[..., ServerEngine]
Telling = Callable[[dict[str, Any]], Any]


def telling(reply: Any, lie: Telling, token_ids: list[int], **meta: Any) -> Any:
    async def answer(request: web.Request) -> web.StreamResponse:
        content = reply(token_ids, to=await request.json(), **meta)
        lie(content)
        return web.json_response(content)

    return answer


def logprob(value: float) -> Telling:
    return lambda r: r["meta_info"]["output_token_logprobs"][1].__setitem__(0, value)


X11 = [
    (logprob(0.7), "its logprobs go from -0.5 to 0.7"),
    (logprob(100.0), "its logprobs go from -0.5 to 100"),
    (logprob(-1e30), "its logprobs go from -1e"),
    (lambda r: r["meta_info"]["output_token_logprobs"][1].__setitem__(1, 9), "not the ids beside its logprobs"),
    (lambda r: r["meta_info"].update(output_token_logprobs=[[[-0.5, 7, None]], [[-0.5, 8, None]]]), "Expected"),
    (lambda r: r.update(output_ids=[[7, 8, 9, 9]]), "output_ids are not all integers"),
]
X12 = [
    (lambda r: r["meta_info"].update(prompt_tokens=1), "answers 1 prompt tokens, 3 were sent"),
    (lambda r: r["meta_info"].update(id="another"), "answers request another, not r."),
    (lambda r: r["meta_info"].update(weight_version="999"), "tokens of version 999, 0 is the newest"),
    (lambda r: r["meta_info"].update(weight_version=1 << 80), "is no policy version"),
    (lambda r: r["meta_info"].update(weight_version=True), "Expected"),
]
X13 = [
    (lambda r: r["meta_info"].update(finish_reason={"type": "stop", "matched": "END"}), "stopped at 'END'"),
    (lambda r: r["meta_info"].update(finish_reason={"type": "stop", "matched": 8}), "it stopped at token 8"),
    (lambda r: r["meta_info"].update(finish_reason={"type": "boredom"}), "unknown finish reason 'boredom'"),
]


async def assert_refused(scripted: Any, engine_at: EngineAt, reply: Any, lie: Telling, said: str) -> None:
    async with scripted() as (server,), engine_at(server) as engine:
        server.generate = telling(reply, lie, [7, 8, 9, 9])
        with pytest.raises(EngineProtocolError) as caught:
            await engine.generate(PROMPT, SamplingParams(max_new_tokens=4), request_id="r")
        assert said in str(caught.value)
        assert server.address in str(caught.value)
        assert engine.metrics()["rejected_replies"] == 1
        server.generate = server.answer_whole
        assert len((await engine.generate(PROMPT, SamplingParams(max_new_tokens=4), request_id="r")).token_ids) == 4


@pytest.mark.parametrize(("lie", "said"), X11)
async def test_x11_tokens_that_cannot_be_are_refused(
    scripted: Any, engine_at: EngineAt, reply: Any, lie: Telling, said: str
) -> None:
    await assert_refused(scripted, engine_at, reply, lie, said)


@pytest.mark.parametrize(("lie", "said"), X12)
async def test_x12_an_answer_to_something_else_is_refused(
    scripted: Any, engine_at: EngineAt, reply: Any, lie: Telling, said: str
) -> None:
    await assert_refused(scripted, engine_at, reply, lie, said)


@pytest.mark.parametrize(("lie", "said"), X13)
async def test_x13_a_stop_at_nothing_is_refused(
    scripted: Any, engine_at: EngineAt, reply: Any, lie: Telling, said: str
) -> None:
    await assert_refused(scripted, engine_at, reply, lie, said)


def read(token_id: Any, *, logprob: float) -> None:
    """Read a reply of one token, and check it."""
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[logprob, token_id, None]]}
    made = decode_reply(json.dumps({"output_ids": [token_id], "meta_info": meta}).encode(), max_new_tokens=4)
    check_tokens(made.token_ids, made.logprobs, vocab_size=1000)


@given(st.floats(width=64).filter(lambda x: not -1000.0 <= x <= 1e-3))
@example(np.nextafter(1e-3, 1.0).item() + 1e-9)
def test_x11_no_number_that_is_no_logprob_is_read(value: float) -> None:
    with pytest.raises((EngineProtocolError, TryFailedError)):
        read(7, logprob=value)


@given(st.one_of(st.integers(max_value=-1), st.integers(min_value=1000), st.floats(width=64), st.booleans(), st.none()))
@example(2**31 - 1)
@example(2**31)
@example(2**32 + 7)
@example(2**63)
@example(2**64 + 7)
def test_x11_no_id_that_is_none_of_the_vocabulary_is_read(value: Any) -> None:
    assume(not (isinstance(value, float) and value.is_integer() and 0 <= value < 1000))
    with pytest.raises((EngineProtocolError, TryFailedError)):
        read(value, logprob=-0.5)


@given(st.integers(0, 12), st.integers(1, 8), st.sampled_from(["length", "stop"]))
def test_x13_a_response_ends_at_its_limit_or_at_a_token(num_tokens: int, most: int, kind: str) -> None:
    fits = num_tokens == most if kind == "length" else 0 < num_tokens <= most
    with contextlib.nullcontext() if fits else pytest.raises(EngineProtocolError):
        check_finish(
            FinishReason(FinishKind(kind)),
            num_prompt_tokens=3,
            num_tokens=num_tokens,
            max_new_tokens=most,
            context_length=4096,
        )


@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(), st.lists, max_leaves=3)
)
@example(-1)
@example(2**64)
@example("7" * 16)
@example("0x10")
@example(True)
def test_x12_no_name_but_a_number_is_a_version(name: Any) -> None:
    try:
        version = version_number(name)
    except EngineProtocolError:
        return
    assert isinstance(name, int | str)
    assert 0 <= version < 10**15


@pytest.mark.parametrize(
    ("token_ids", "finish", "said"),
    [
        ([7, 8, 9], {"type": "length", "length": 3}, "ended for its length after 3 of 8 tokens"),
        ([], {"type": "stop", "matched": None}, "stopped before its first token"),
        ([7, 1 << 20], {"type": "stop", "matched": None}, "out of a vocabulary of 1000"),
    ],
)
async def test_x13_an_end_that_cannot_be_is_refused(
    scripted: Any, engine_at: EngineAt, reply: Any, token_ids: list[int], finish: Any, said: str
) -> None:
    async with scripted() as (server,), engine_at(server, vocab_size=1000) as engine:
        server.generate = telling(reply, lambda r: None, token_ids, finish=finish)
        with pytest.raises(EngineProtocolError) as caught:
            await engine.generate(PROMPT, SamplingParams(max_new_tokens=8), request_id="r")
        assert said in str(caught.value)


@pytest.mark.parametrize("text", ["a right answer", None])
async def test_x10_text_is_made_of_the_tokens_whatever_the_server_says(
    scripted: Any, engine_at: EngineAt, reply: Any, text: str | None
) -> None:
    async with scripted() as (server,), engine_at(server) as engine:
        server.generate = telling(reply, lambda r: r.pop("text") if text is None else r.update(text=text), [72, 105])
        completion = await engine.generate(PROMPT, SamplingParams(max_new_tokens=2), request_id="r")
    assert completion.text == "Hi"


async def test_x12_a_version_of_somebody_else_is_taken_over_when_all_servers_have_it(
    scripted: Any, engine_at: EngineAt, reply: Any
) -> None:
    async with scripted(2) as servers, engine_at(*servers, probe_interval_seconds=60.0) as engine:
        params = SamplingParams(max_new_tokens=2)
        for server in servers:
            server.version = "5"
        through, after = [await engine.generate(PROMPT, params, request_id="r") for _ in range(2)]
        assert engine.policy_version == 5
        assert {span.policy_version for span in through.version_spans} == {0}  # at most: it was sent before
        assert {span.policy_version for span in after.version_spans} == {5}
        servers[0].version = "6"
        prompts = [np.array([number, 7], np.int32) for number in range(20)]
        answers = await asyncio.gather(*(engine.generate(ids, params, request_id="x") for ids in prompts))
        assert {span.policy_version for each in answers for span in each.version_spans} == {5}
        assert engine.metrics()["rejected_replies"] == 0


async def test_x14_an_endless_reply_is_bounded_by_what_was_asked_for(scripted: Any, engine_at: EngineAt) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while sent < 1 << 26:
            await response.write(b" " * (1 << 16))
            sent += 1 << 16
        return response

    async with scripted() as (server,), engine_at(server, max_tries=1) as engine:
        server.generate = endless
        with pytest.raises(EngineUnavailableError, match=r"a body of more than \d+ bytes, which are the most"):
            await engine.generate(PROMPT, SamplingParams(max_new_tokens=2), request_id="r")
    assert sent < 1 << 25


@pytest.mark.parametrize(
    "lie",
    [Lie.ENDLESS_BODY, Lie.LONG_BODY, Lie.PROVISIONAL_REPLIES, Lie.COMPRESSED_BODY, Lie.DEEP_JSON, Lie.LONG],
)
async def test_x14_what_would_fill_the_memory_is_refused(engine_at: EngineAt, lie: Lie) -> None:
    faults = [{"kind": "lie", "lie": lie, "times": 1}]
    async with serve_fake_sglang(faults=faults) as fakes, engine_at(fakes.address, max_tries=2) as engine:
        tracemalloc.start()
        asked = engine.generate(PROMPT, SamplingParams(max_new_tokens=4), request_id="r")
        (completion,) = await asyncio.gather(asked, return_exceptions=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 24
        counted = engine.counters
        assert counted.connection_failures + counted.broken_replies + counted.rejected_replies == 1
        assert isinstance(completion, EngineProtocolError) == (lie is Lie.LONG)


@given(st.dictionaries(st.sampled_from(LOAD), st.integers() | st.floats() | st.text(max_size=3) | st.none()))
@example({"num_running_reqs": 5, "num_waiting_reqs": -5, "token_usage": 1.0})
@example({"num_running_reqs": 1e308, "num_waiting_reqs": 1e308, "token_usage": -1.0})
@example({"gen_throughput": 1e308, "num_running_reqs": 2**70})
@example({"total_prefill_busy_us": -1, "total_prefill_uncached_tokens": -1e-300, "num_used_tokens": 1e300})
def test_x12_no_load_that_cannot_be_is_reckoned_with(load: dict[str, Any]) -> None:
    class Told:
        async def control(self, method: str, url: str, *args: Any, **options: Any) -> ControlReply:
            told = b"sglang:num_retracted_requests_total " + b"9" * 500 if url.endswith("metrics") else b""
            return ControlReply(200, told or json.dumps({"loads": [load, load]}).encode())

    dialect = SGLang(SGLangSettings(workers=("http://x:1",)))
    dialect._http = Told()  # type: ignore[assignment]
    told = asyncio.run(dialect.load("http://x:1"))
    if told is not None and told.is_plausible:
        assert room_at(told, 7) >= 1.0
        assert memory_room([told], 7) >= 0.0


async def test_another_server_is_asked_once_where_one_has_lied(scripted: Any, engine_at: EngineAt, reply: Any) -> None:
    params = SamplingParams(max_new_tokens=4, seed=3)
    async with scripted(2) as servers, engine_at(*servers, routing="round_robin") as engine:
        servers[0].generate = telling(reply, logprob(0.7), [7, 8, 9, 9])
        for _ in range(4):
            completion = await engine.generate(PROMPT, params, request_id="r")
            assert completion.token_ids.tolist() == [5] * 4
        bodies = [server.requests for server in servers]
        assert 1 <= len(bodies[0]) == engine.counters.rejected_replies == engine.counters.retries < 4
        assert {body["sampling_params"]["sampling_seed"] for server in bodies for body in server} == {3}
        servers[1].generate, num_before = servers[0].generate, engine.counters.rejected_replies
        with pytest.raises(EngineProtocolError):
            await engine.generate(PROMPT, params, request_id="r")
        assert engine.counters.rejected_replies == num_before + 2
