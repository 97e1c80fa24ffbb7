from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import numpy as np
import pytest
from tests.engine.pictures.seeing import PARAMS, png, uri

from rollfeed.errors import EngineProtocolError, PictureMismatchError
from rollfeed.types import FinishKind

KEEP_TELLING = lambda reply: None  # noqa: E731


def tell_nothing(reply: dict[str, Any]) -> None:
    """As servers do that have no hashes."""
    reply["meta_info"].pop("pictures", None)


async def test_a_server_gets_one_placeholder_a_picture_and_says_what_it_saw(serving, sglang_at, ask) -> None:
    asked = ask("<image>red <image>?", 1, 2)
    async with serving() as server, sglang_at(server.address) as engine:
        completion = await engine.generate(asked.token_ids, PARAMS, request_id="a", images=asked.images)
        again = await engine.generate(asked.token_ids, PARAMS, request_id="b", images=asked.images)
        other = await engine.generate(asked.token_ids, PARAMS, request_id="c", images=asked.images[::-1])
    assert completion.prompt_tokens == len(asked.token_ids)
    np.testing.assert_array_equal(completion.token_ids, again.token_ids)
    np.testing.assert_allclose(completion.logprobs, again.logprobs, atol=1e-5)
    assert not np.allclose(completion.logprobs[:1], other.logprobs[:1], atol=1e-5)
    first = server.bodies[-3]
    assert first["image_data"] == [uri(png(1)), uri(png(2))]
    assert len(first["input_ids"]) < len(asked.token_ids)
    # Two before, which ask whether it looks at pictures at all.
    assert len(server.bodies) == 5


def remove(body: dict[str, Any]) -> None:
    del body["image_data"]


def swap(body: dict[str, Any]) -> None:
    body["image_data"].reverse()


def resize(body: dict[str, Any]) -> None:
    body["image_data"][0] = uri(png(1, (4, 3)))


def double(body: dict[str, Any]) -> None:
    """As a server does that puts placeholders into a prompt that has them."""
    place = max(body["input_ids"])  # of a model whose last token is the placeholder
    body["input_ids"] = [each for token in body["input_ids"] for each in [token] * (2 if token == place else 1)]
    body["image_data"] = [each for each in body["image_data"] for _ in range(2)]


def blind(body: dict[str, Any]) -> None:
    body["image_data"] = [uri(png(9))] * len(body["image_data"])


@pytest.mark.parametrize(
    ("fault", "tells", "message"),
    [
        (remove, KEEP_TELLING, r"answers \d+ prompt tokens, \d+ were sent"),
        (remove, tell_nothing, r"answers \d+ prompt tokens, \d+ were sent"),
        (swap, KEEP_TELLING, r"picture 1, data:: the engine has seen \w{12}\.\.\., and \w{12}\.\.\. was sent"),
        (resize, KEEP_TELLING, r"picture 1, data:: the engine has seen"),
        (double, KEEP_TELLING, "the engine has seen 4 pictures, and 2 were sent"),
        (double, tell_nothing, r"answers \d+ prompt tokens, \d+ were sent"),
    ],
)
async def test_pictures_that_change_on_the_way_are_found(serving, sglang_at, ask, fault, tells, message) -> None:
    asked = ask("<image>red <image>?", 1, 2)
    async with serving() as server, sglang_at(server.address) as engine:
        await engine.generate(asked.token_ids, PARAMS, request_id="a", images=asked.images)
        server.change, server.change_reply = fault, tells
        with pytest.raises(PictureMismatchError, match=f"^{server.address}: {message}"):
            await engine.generate(asked.token_ids, PARAMS, request_id="b", images=asked.images)


async def test_a_server_that_looks_at_nothing_is_found_before_it_answers(serving, sglang_at, ask) -> None:
    asked = ask("<image>red?", 1)
    async with serving() as server, sglang_at(server.address) as engine:
        server.change, server.change_reply = blind, tell_nothing
        with pytest.raises(PictureMismatchError, match="it does not look at the pictures that it is sent"):
            await engine.generate(asked.token_ids, PARAMS, request_id="a", images=asked.images)


async def test_a_server_is_looked_at_once_for_all_that_come_at_once(serving, sglang_at, ask) -> None:
    asked = ask("<image>red?", 1)
    async with serving() as server, sglang_at(server.address) as engine:
        await asyncio.gather(
            *(engine.generate(asked.token_ids, PARAMS, request_id=name, images=asked.images) for name in "abcd")
        )
    assert len(server.bodies) == 2 + 4


async def test_a_first_token_that_is_certain_says_nothing_of_sight(serving, sglang_at, ask) -> None:
    def be_certain(reply: dict[str, Any]) -> None:
        reply["output_ids"][0], reply["meta_info"]["output_token_logprobs"][0] = 5, [0.0, 5, None]

    asked = ask("<image>red?", 1)
    async with serving() as server, sglang_at(server.address) as engine:
        server.change_reply = be_certain
        completion = await engine.generate(asked.token_ids, PARAMS, request_id="a", images=asked.images)
    assert completion.logprobs[0] == 0.0


async def test_a_server_that_is_interrupted_is_asked_again_whether_it_sees(serving, sglang_at, ask) -> None:
    def abort(reply: dict[str, Any]) -> None:
        if len(server.bodies) <= 2:
            about = {"finish_reason": {"type": "abort", "message": "interrupted"}, "output_token_logprobs": []}
            reply["output_ids"] = []
            reply["meta_info"] |= {**about, "completion_tokens": 0, "weight_versions": None}
            reply["meta_info"].pop("output_token_logprobs_length", None)

    asked = ask("<image>red?", 1)
    async with serving() as server, sglang_at(server.address) as engine:
        server.change_reply = abort
        completion = await engine.generate(asked.token_ids, PARAMS, request_id="a", images=asked.images)
    assert completion.finish_reason.kind is not FinishKind.ABORT


async def test_what_is_aborted_while_sight_is_found_out_is_not_sent(serving, sglang_at, ask) -> None:
    asked = ask("<image>red?", 1)
    async with serving() as server, sglang_at(server.address) as engine:
        server.goes_on.clear()
        both = [
            asyncio.ensure_future(engine.generate(asked.token_ids, PARAMS, request_id=name, images=asked.images))
            for name in "ab"
        ]
        await server.arrived.wait()
        while len(engine._flights) < len(both):  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)
        await engine.abort()
        server.goes_on.set()
        completions = await asyncio.gather(*both)
    assert [each.finish_reason.kind for each in completions] == [FinishKind.ABORT] * 2
    assert all(body["rid"].startswith("sight") for body in server.bodies)


async def test_text_that_is_tokenised_in_another_way_fails_its_rollout_only(serving, sglang_at, ask) -> None:
    def as_text(reply: dict[str, Any]) -> None:
        """As a server does that makes text of the ids: "red" is one token then."""
        reply["meta_info"]["prompt_tokens"] -= 2

    asked, other = ask("<image>red?", 1), ask("<image>r", 1)
    (r,), (e,), (d,) = (ask(letter).token_ids[:1] for letter in "red")
    sampled = np.concatenate([asked.token_ids, [r, e, d]]).astype(np.int32)
    async with serving() as server, sglang_at(server.address) as engine:
        await engine.generate(other.token_ids, PARAMS, request_id="a", images=other.images)
        server.change_reply = as_text
        with pytest.raises(EngineProtocolError, match="it makes text of a prompt with pictures, which is tokenised"):
            await engine.generate(sampled, PARAMS, request_id="b", images=asked.images)
        with pytest.raises(PictureMismatchError, match="it has made more or less of 1 pictures"):
            await engine.generate(asked.token_ids, PARAMS, request_id="c", images=asked.images)


@pytest.mark.parametrize("body", [{}, {"text": ["a"]}, {"text": None, "input_ids": None}, {"input_ids": [[1]]}])
async def test_pictures_without_one_prompt_are_refused(serving, body: dict[str, Any]) -> None:
    async with serving() as server, aiohttp.ClientSession() as session:
        asked = {**body, "image_data": [uri(png(1))]}
        async with session.post(f"{server.address}/generate", json=asked) as reply:
            told = await reply.json()
    assert (reply.status, "one prompt a request, in text or input_ids" in told["error"]["message"]) == (400, True)


async def test_an_answer_is_gone_on_from_with_its_pictures(serving, sglang_at, ask) -> None:
    asked = ask("<image>red?", 1)
    said = np.concatenate([asked.token_ids, asked.token_ids[-2:]])
    async with serving() as server, sglang_at(server.address) as engine:
        completion = await engine.generate(said, PARAMS, request_id="a", images=asked.images)
    assert completion.prompt_tokens == len(said)


async def test_pictures_that_do_not_fit_their_prompt_are_not_sent(serving, sglang_at, ask) -> None:
    asked = ask("<image>red?", 1)
    async with serving() as server, sglang_at(server.address) as engine:
        with pytest.raises(EngineProtocolError, match="no place for picture 2 of 2"):
            await engine.generate(asked.token_ids, PARAMS, request_id="a", images=asked.images * 2)
    assert server.bodies == []
