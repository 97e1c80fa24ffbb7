from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from tests.engine.openai.conftest import TOKENS, FakeVLLM
from tests.engine.pictures.seeing import PARAMS, png, uri

from rollfeed.app.model import Model
from rollfeed.base.serving import serve_application
from rollfeed.errors import PictureMismatchError


class SeeingVLLM(FakeVLLM):
    """Takes pictures on its route for tokens, as vLLM does from 0.30 on."""

    def __init__(self, mark_id: int, tokens_a_picture: int) -> None:
        super().__init__()
        self.mark_id, self.tokens_a_picture = mark_id, tokens_a_picture
        self.change: Callable[[dict[str, Any]], None] = lambda body: None
        self.change_reply: Callable[[dict[str, Any]], None] = lambda reply: None
        self.kept: list[dict[str, Any]] = []
        self._seen = 0
        self._about: dict[str, Any] = {}

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path != TOKENS or not body.get("content_parts"):
            self._seen = 0
            return await super()._answer(request, body)
        asked = {**body, "token_ids": list(body["token_ids"]), "content_parts": list(body["content_parts"])}
        self.change(asked)
        ids, places = list[int](), list[dict[str, int]]()
        for token in asked["token_ids"]:
            is_place = token == self.mark_id and len(places) < len(asked["content_parts"])
            if is_place:
                places.append({"offset": len(ids), "length": self.tokens_a_picture})
            ids += [token] * (self.tokens_a_picture if is_place else 1)
        # What it says depends on its pictures and on their order.
        shown = "".join(part["url"] for part in asked["content_parts"])
        self._seen = 97 + int(hashlib.sha256(shown.encode()).hexdigest(), 16) % 26
        self._about = {"prompt_token_ids": list(ids), "mm_placeholders": {"image": places}}
        self.change_reply(self._about)
        self.kept.append(body)
        return await super()._answer(request, {**body, "token_ids": ids})

    async def _send(self, response: web.StreamResponse, chunk: Any) -> None:
        about, self._about = self._about, {}  # with the first event
        await super()._send(response, chunk | about)

    def _sample(self, prompt: list[int], params: dict[str, Any]) -> list[tuple[int, float]]:
        return super()._sample([*prompt, self._seen] if self._seen else prompt, params)


Serving = Callable[[], AbstractAsyncContextManager[SeeingVLLM]]


@pytest.fixture
def seeing_vllm(vision_model: Model, ask) -> Serving:
    @asynccontextmanager
    async def start() -> AsyncIterator[SeeingVLLM]:
        asked = ask("<image>", 1)
        (place,) = vision_model.pictures.locate(asked.token_ids, asked.images)
        server = SeeingVLLM(int(asked.token_ids[place.start]), place.end - place.start)
        application = web.Application(client_max_size=1 << 28)
        application.router.add_route("*", "/{path:.*}", server.handle)
        async with serve_application(application, host="127.0.0.1", port=0) as server.address:
            yield server

    return start


async def test_vllm_gets_parts_and_says_which_tokens_are_pictures(seeing_vllm: Serving, vllm_at, ask) -> None:
    asked = ask("<image>red <image>?", 1, 2)
    async with seeing_vllm() as server, vllm_at(server.address) as engine:
        completion = await engine.generate(asked.token_ids, PARAMS, request_id="a", images=asked.images)
        assert completion.prompt_tokens == len(asked.token_ids)
        body = server.kept[-1]
        assert [part["url"] for part in body["content_parts"]] == [uri(png(1)), uri(png(2))]
        assert body["token_ids"].count(server.mark_id) == 2
        assert body["return_token_ids"] is True
        text = await engine.generate(np.array([3, 4], np.int32), PARAMS, request_id="b")
        assert text.prompt_tokens == 2


def removed(body: dict[str, Any]) -> None:
    body["content_parts"] = body["content_parts"][:1]


def doubled(body: dict[str, Any]) -> None:
    place = max(body["token_ids"])
    body["token_ids"] = [each for token in body["token_ids"] for each in [token] * (2 if token == place else 1)]
    body["content_parts"] *= 2


def larger(reply: dict[str, Any]) -> None:
    reply["prompt_token_ids"].insert(2, reply["prompt_token_ids"][1])


def moved(reply: dict[str, Any]) -> None:
    reply["mm_placeholders"]["image"][0]["length"] -= 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"change": removed}, r"the server has made \d+ tokens of a prompt with pictures that are not the \d+"),
        ({"change": doubled}, r"the server has made \d+ tokens of a prompt with pictures"),
        ({"change_reply": larger}, r"the server has made \d+ tokens of a prompt with pictures"),
        ({"change_reply": moved}, r"picture 1: the engine has seen it in tokens 0 to \d+, and its place is 0 to \d+"),
    ],
)
async def test_pictures_that_change_on_the_way_are_found(seeing_vllm: Serving, vllm_at, ask, fault, message) -> None:
    asked = ask("<image>red <image>?", 1, 2)
    async with seeing_vllm() as server, vllm_at(server.address) as engine:
        await engine.generate(asked.token_ids, PARAMS, request_id="a", images=asked.images)
        vars(server).update(fault)
        with pytest.raises(PictureMismatchError, match=f"^{server.address}: {message}"):
            await engine.generate(asked.token_ids, PARAMS, request_id="b", images=asked.images)


async def test_a_server_that_looks_at_nothing_is_found_before_it_answers(seeing_vllm: Serving, vllm_at, ask) -> None:
    asked = ask("<image>red?", 1)
    async with seeing_vllm() as server, vllm_at(server.address) as engine:
        server.change = lambda body: body.update(content_parts=[{"type": "image_url", "url": "same"}])
        with pytest.raises(PictureMismatchError, match="it does not look at the pictures that it is sent"):
            await engine.generate(asked.token_ids, PARAMS, request_id="a", images=asked.images)
