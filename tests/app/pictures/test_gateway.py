"""Sessions of a gateway whose agents show pictures, over a restart."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tests.engine.pictures.seeing import SETTINGS, png, uri

from rollfeed.app.gateway import serve_gateway
from rollfeed.app.model import Endpoint
from rollfeed.engine.tiny_vision import tiny_vision_checkpoint
from rollfeed.gateway.policy import Caps, ServedPolicy
from rollfeed.types import SamplingParams


@asynccontextmanager
async def gateway(model: Path, folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    endpoint = Endpoint(model=str(model), context_length=256)
    policy = ServedPolicy(
        tokenizer=endpoint.tokenizer,
        context_length=256,
        params=SamplingParams(max_new_tokens=4, seed=1),
        models=("policy",),
        picture_input=endpoint.picture_input,
    )
    options: Any = {"caps": Caps(), "max_sessions": 4, "token": "", "host": "127.0.0.1", "port": 0}
    async with (
        serve_gateway(endpoint, policy, folder=folder, **options) as address,
        aiohttp.ClientSession(address) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_checkpoint(SETTINGS, seed=0, cache_directory=tmp_path_factory.mktemp("vision"))


def client(http: aiohttp.ClientSession, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{http._base_url}/v1", api_key=key, max_retries=0)


def shown(seed: int) -> list[Any]:
    parts = [{"type": "input_image", "image_url": uri(png(seed))}, {"type": "input_text", "text": "red?"}]
    return [{"role": "user", "content": parts}]


def digest(seed: int) -> str:
    return hashlib.sha256(png(seed)).hexdigest()


async def test_a_session_goes_on_from_its_pictures_after_a_restart(model: Path, tmp_path: Path) -> None:
    async with gateway(model, tmp_path) as http:
        async with http.post("/sessions", json={}) as reply:
            opened = await reply.json()
        async with client(http, opened["key"]) as agent:
            first = await agent.responses.create(model="policy", input=shown(1))
    async with gateway(model, tmp_path) as http:
        async with client(http, opened["key"]) as agent:
            second = await agent.responses.create(model="policy", input=shown(2), previous_response_id=first.id)
            # The same conversation, sent whole: it goes on from the first turn, too.
            again = [*shown(1), *(item.model_dump() for item in first.output), *shown(2)]
            await agent.responses.create(model="policy", input=again)
            # And one with another picture in the same place does not.
            other = [*shown(3), *(item.model_dump() for item in first.output), *shown(2)]
            await agent.responses.create(model="policy", input=other)
        async with http.post(f"/sessions/{opened['id']}/finish", json={}) as reply:
            samples = (await reply.json())["samples"]
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    hashes = [[picture["content_hash"] for picture in sample["images"]] for sample in samples]
    assert hashes == [[digest(1), digest(2)], [digest(3), digest(2)]]
    # The turn before is trained where it was sampled; the other history only shows it.
    assert [sample["metadata"]["num_forks"] for sample in samples] == [1, 1]
    assert [sum(sample["loss_mask"]) for sample in samples] == [8, 4]
    assert {path.read_bytes() for path in (tmp_path / "pictures").iterdir()} == {png(1), png(2), png(3)}
