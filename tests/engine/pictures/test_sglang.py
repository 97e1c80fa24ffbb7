from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.engine.pictures.seeing import PARAMS, png, uri

from rollfeed.errors import EngineProtocolError, PictureMismatchError

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
