"""Each failure over a real socket: what can succeed is tried again, the rest fails at once, and all is counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.testing.virtual_loop import in_virtual_time
from rollfeed.types import FinishKind

PROMPT = np.array([112, 113, 114], np.int32)
COMPLETIONS = "/v1/completions"
Fault = Callable[[web.Request], Awaitable[web.StreamResponse]]


def status(code: int, **headers: str) -> Fault:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"status {code}"}}, status=code, headers=headers)

    return answer


async def reset(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def whole(**changes: Any) -> Fault:
    """A reply that is not streamed, with what is changed in its choice."""

    async def answer(_request: web.Request) -> web.StreamResponse:
        choice: dict[str, Any] = {
            "index": 0,
            "text": "abc",
            "token_ids": [97, 98, 99],
            "logprobs": {"token_logprobs": [-0.5, -0.5, -0.5]},
            "finish_reason": "length",
        }
        return web.json_response({"choices": [choice | changes]})

    return answer


def streamed(*pieces: bytes, breaks: bool = False) -> Fault:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if breaks:
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write_eof()
        return response

    return answer


def event(ids: list[int], finish: str | None = None) -> bytes:
    logprobs = {"token_logprobs": [-0.5] * len(ids)}
    choice = {"index": 0, "text": "", "token_ids": ids, "logprobs": logprobs, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("fault", "counter"),
    [
        (status(500), "server_errors"),
        (status(503), "server_errors"),
        (status(429), "refused_requests"),
        (status(429, **{"Retry-After": "0"}), "refused_requests"),
        (reset, "connection_failures"),
        (streamed(b'data: {"choices": [{"ind\n\n'), "broken_replies"),
        (streamed(event([97]), breaks=True), "connection_failures"),
        (streamed(event([97])), "connection_failures"),
        (streamed(b'data: {"error": {"message": "engine dead", "code": 500}}\n\n', DONE), "server_errors"),
        (streamed(DONE), "unasked_aborts"),
        (streamed(event([], "abort"), DONE), "unasked_aborts"),
    ],
)
async def test_what_may_succeed_is_tried_again(
    vllm: Any, engine_at: Any, asked: Any, rescored: Any, fault: Fault, counter: str
) -> None:
    async with vllm(routes={COMPLETIONS}, faults=[fault]) as server, engine_at(server) as engine:
        completion = await engine.generate(PROMPT, asked(), request_id="a")
        assert completion.finish_reason.kind is FinishKind.LENGTH
        assert len(completion.token_ids) == 6
        counters = engine.counters.totals()
        assert (counters[counter], counters["retries"], counters["rejected_replies"]) == (1, 1, 0)
        ids = [body["request_id"] for body in server.bodies]
        assert len(set(ids)) == 2


async def test_a_broken_stream_goes_on_from_the_tokens_that_arrived(vllm: Any, engine_at: Any, asked: Any) -> None:
    fault = streamed(event([97]), event([98]), breaks=True)
    async with vllm(routes={COMPLETIONS}, faults=[fault]) as server, engine_at(server) as engine:
        completion = await engine.generate(PROMPT, asked(6, min_new_tokens=3), request_id="a")
        assert completion.token_ids[:2].tolist() == [97, 98]
        assert len(completion.token_ids) == 6
        body = server.bodies[-1]
        assert body["prompt"] == [*PROMPT.tolist(), 97, 98]
        assert (body["max_tokens"], body["min_tokens"]) == (4, 1)
        assert body["seed"] != 1
        assert engine.counters.resumed_requests == 1
        assert completion.prompt_tokens == 3


async def test_a_stream_that_breaks_after_all_tokens_is_whole(vllm: Any, engine_at: Any, asked: Any) -> None:
    fault = streamed(event([97] * 6), breaks=True)
    async with vllm(routes={COMPLETIONS}, faults=[fault]) as server, engine_at(server) as engine:
        completion = await engine.generate(PROMPT, asked(6), request_id="a")
        assert (completion.finish_reason.kind, completion.token_ids.tolist()) == (FinishKind.LENGTH, [97] * 6)
        assert len(server.bodies) == 1


async def test_a_stream_that_ends_without_a_reason_goes_on(vllm: Any, engine_at: Any, asked: Any) -> None:
    async with vllm() as server, engine_at(server) as engine:
        server.abort_at = 2
        completion = await engine.generate(PROMPT, asked(), request_id="a")
        assert (completion.finish_reason.kind, len(completion.token_ids)) == (FinishKind.LENGTH, 6)
        assert len(server.bodies) == 2


async def test_a_stream_that_breaks_after_its_reason_is_whole(vllm: Any, engine_at: Any, asked: Any) -> None:
    fault = streamed(event([97, 98], "stop"), breaks=True)
    async with vllm(routes={COMPLETIONS}, faults=[fault]) as server, engine_at(server) as engine:
        completion = await engine.generate(PROMPT, asked(), request_id="a")
        assert (completion.finish_reason.kind, completion.token_ids.tolist()) == (FinishKind.STOP, [97, 98])
        assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (status(400), "HTTP 400: status 400"),
        (status(404), "HTTP 404"),
        (status(307, Location="http://127.0.0.1:9/"), "HTTP 307"),
        (whole(logprobs={"token_logprobs": [-0.5, -0.5]}), "2 logprobs for 3 tokens"),
        (whole(logprobs={"token_logprobs": [-0.5, None, -0.5]}), "a sampled token has no logprob"),
        (whole(logprobs={"token_logprobs": [-0.5, -9999.0, -0.5]}), "a sampled token has no logprob"),
        (whole(logprobs={"token_logprobs": [-0.5, 0.3, -0.5]}), "a logprob is 0.3"),
        (whole(logprobs=None), "it has no logprobs"),
        (whole(token_ids=None), "it has no token ids"),
        (whole(token_ids=[97, 98, 1 << 40]), "its token ids go from 97 to 1099511627776"),
        (whole(token_ids=[97, 98, -1]), "its token ids go from -1 to 98"),
        (whole(finish_reason="content_filter"), "unknown finish reason 'content_filter'"),
        (whole(finish_reason="stop", stop_reason=3), "it stopped at token 3, which is not the last"),
        (whole(prompt_token_ids=[1, 112, 113, 114]), "did not see the tokens that it was sent"),
        (whole(token_ids=list(range(7)), logprobs={"token_logprobs": [-0.5] * 7}), "more than 6 tokens"),
        (whole(token_ids="abc"), "reply: "),
        (streamed(b'data: {"error": {"message": "too long", "code": 400}}\n\n', DONE), "too long"),
    ],
)
async def test_what_would_fail_again_fails_at_once(
    vllm: Any, engine_at: Any, asked: Any, fault: Fault, message: str
) -> None:
    async with vllm(routes={COMPLETIONS}, faults=[fault]) as server, engine_at(server) as engine:
        with pytest.raises(EngineProtocolError) as caught:
            await engine.generate(PROMPT, asked(), request_id="a")
        assert message in str(caught.value)
        assert len(server.bodies) == 1
        assert engine.counters.rejected_replies == 1
        assert len((await engine.generate(PROMPT, asked(), request_id="a")).token_ids) == 6


async def test_tries_are_bounded(vllm: Any, engine_at: Any, asked: Any) -> None:
    async with vllm(faults=[status(500)] * 9) as server, engine_at(server, max_tries=3) as engine:
        with pytest.raises(EngineUnavailableError, match=r"no answer after 3 failed tries; the last: .*status 500"):
            await engine.generate(PROMPT, asked(), request_id="a")
        assert len(server.bodies) == 3


@in_virtual_time
async def test_a_hanging_server_is_given_up_at_the_deadline(vllm: Any, engine_at: Any, asked: Any, until: Any) -> None:
    async with vllm() as server, engine_at(server, request_timeout_seconds=0.2) as engine:
        server.hold_after = 2
        with pytest.raises(EngineUnavailableError, match=r"no answer within request_timeout_seconds = 0\.2"):
            await engine.generate(PROMPT, asked(), request_id="a")
        assert engine.counters.timed_out_requests == 1
        await until(lambda: server.closed == 1)


async def test_a_stream_that_stays_open_after_its_end_holds_nobody(
    vllm: Any, engine_at: Any, asked: Any, until: Any
) -> None:
    release = asyncio.Event()

    async def lingering(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event([97], "stop") + DONE)
        await release.wait()
        return response

    async with vllm(routes={COMPLETIONS}, faults=[lingering]) as server, engine_at(server) as engine:
        assert (await engine.generate(PROMPT, asked(), request_id="a")).token_ids.tolist() == [97]
        release.set()


async def test_events_may_be_cut_anywhere(vllm: Any, engine_at: Any, asked: Any) -> None:
    content = b": comment\r\n\r\n" + event([97]).replace(b"\n", b"\r\n") + event([98, 99], "stop") + DONE
    pieces = [content[i : i + 7] for i in range(0, len(content), 7)]
    async with vllm(routes={COMPLETIONS}, faults=[streamed(*pieces)]) as server, engine_at(server) as engine:
        assert (await engine.generate(PROMPT, asked(), request_id="a")).token_ids.tolist() == [97, 98, 99]


async def test_a_long_event_is_read(vllm: Any, engine_at: Any, asked: Any) -> None:
    prompt = np.full(200_000, 97, np.int32)
    async with vllm(routes={COMPLETIONS}) as server, engine_at(server) as engine:
        assert len((await engine.generate(prompt, asked(), request_id="a")).token_ids) == 6


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (
            {"logprobs": {"tokens": ["token_id:97", "token_id:98", "token_id:9"], "token_logprobs": [-0.5] * 3}},
            "beside",
        ),
        ({"logprobs": {"token_logprobs": [-0.5, -0.5, -1e9]}}, "no logprob"),
        ({"logprobs": {"token_logprobs": [-0.5, -0.5, -5000.0]}}, "its logprobs go from -5000"),
        ({"finish_reason": "length"}, "ended for its length after 3 of 6 tokens"),
        ({"finish_reason": "stop", "token_ids": [], "logprobs": {"token_logprobs": []}}, "stopped before its first"),
        ({"finish_reason": "stop", "stop_reason": "END"}, "stopped at 'END', which its tokens do not have"),
    ],
)
async def test_a_lie_is_refused_and_counted(
    vllm: Any, engine_at: Any, asked: Any, lie: dict[str, Any], said: str
) -> None:
    fault = whole(**{"finish_reason": "stop", **lie})
    async with vllm(routes={COMPLETIONS}, faults=[fault]) as server, engine_at(server) as engine:
        with pytest.raises(EngineProtocolError) as caught:
            await engine.generate(PROMPT, asked(6), request_id="a")
        assert said in str(caught.value)
        assert engine.counters.rejected_replies == 1


async def test_text_is_made_of_the_tokens_whatever_the_server_says(vllm: Any, engine_at: Any, asked: Any) -> None:
    fault = whole(text="a right answer")
    async with vllm(routes={COMPLETIONS}, faults=[fault]) as server, engine_at(server) as engine:
        assert (await engine.generate(PROMPT, asked(3), request_id="a")).text == "abc"
