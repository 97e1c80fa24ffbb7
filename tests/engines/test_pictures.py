"""Real servers on the CPU that see: vLLM with a LLaVA in fp32, SGLang with a Qwen2.5-VL in fp16.

A server tells how many tokens it made of pictures, and the trainer's guard finds whatever does not show in that.

Neither has torchvision here, which their modules import and pictures that Pillow prepares do not need.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from tests.engine.pictures.qwen import write_qwen
from tests.engine.pictures.seeing import Tampering, png, uri
from tests.engines.servers import STAND_INS, sglang_server, vllm_server
from tests.training.conftest import make_batch, make_group, make_sample

from rollfeed.app.model import Model, load_model
from rollfeed.base.serving import serve_application
from rollfeed.config import TinyModelSettings
from rollfeed.config.engine import OpenAISettings, SGLangSettings
from rollfeed.config.train import TrainSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import VLLM, SGLang
from rollfeed.engine.tiny_vision import tiny_vision_checkpoint
from rollfeed.errors import EngineProtocolError, PictureMismatchError, RunFailedError
from rollfeed.prompts import ChatRenderer
from rollfeed.protocols import Rendered
from rollfeed.training.trainer import Trainer
from rollfeed.types import SamplingParams, TrainBatch, VersionSpan

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

TINY = TinyModelSettings(words=["red", "green"], hidden_size=128, num_heads=2, num_layers=2, image_size=16)
WAITING: dict[str, Any] = {"startup_timeout_seconds": 120.0, "request_timeout_seconds": 600.0}
Change = Callable[[dict[str, Any]], None]
SIZES = ((60, 40), (40, 60))


@dataclass(frozen=True)
class Served:
    """A model, the server that has it, and how the two are spoken of."""

    name: str
    address: str
    folder: Path
    model: Model
    far: float
    """From a token's logprob to transformers' in fp32, at most."""
    pictures: str
    """The field that has them in a request."""

    def asked(self) -> Rendered:
        """A question about two pictures."""
        renderer = ChatRenderer(self.model.tokenizer, rollout_max_prompt_len=None, **self.model.picture_input._asdict())
        images = [self.model.loader.load(png(seed, size)) for seed, size in enumerate(SIZES, 1)]
        return renderer.render("<image>red <image>?", apply_chat_template=True, images=images)

    def trainer(self, most: float) -> Trainer:
        return Trainer(
            self.folder,
            settings=TrainSettings(device="cpu", threads=1, max_picture_mismatch_kl=most),
            temperature=1.0,
            num_batches=1,
            max_response_length=16,
            pictures=self.model.pictures,
        )

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[tuple[ServerEngine, Tampering]]:
        """Give an engine, and what is between it and the server."""
        between = Tampering(self.address)
        application = web.Application(client_max_size=1 << 28)
        application.router.add_route("*", "/{path:.*}", between.handle)
        async with serve_application(application, host="127.0.0.1", port=0) as between.address:
            dialect = (
                SGLang(SGLangSettings(workers=[between.address], concurrency=8, **WAITING))
                if self.name == "sglang"
                else VLLM(OpenAISettings(base_url=between.address, concurrency=8, **WAITING))
            )
            engine = ServerEngine(
                dialect, context_length=512, tokenizer=self.model.tokenizer, pictures=self.model.pictures
            )
            async with engine:
                yield engine, between


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    work = tmp_path_factory.mktemp(request.param)
    if request.param == "vllm":
        folder = tiny_vision_checkpoint(TINY, seed=0, cache_directory=work)
        more = {"PYTHONPATH": str(STAND_INS), "STAND_INS": "torchvision"}
        with vllm_server(folder, work, "--enable-scale-out", **more) as server:
            yield Served("vllm", server.address, folder, load_model(str(folder)), 2e-4, "content_parts")
    else:
        folder = work / "qwen"
        folder.mkdir()
        write_qwen(folder, with_weights=True)
        with sglang_server(folder, work, "--image-processor-backend", "pil") as server:
            yield Served("sglang", server.address, folder, load_model(str(folder)), 0.05, "image_data")


async def answered(served: Served, change: Change) -> TrainBatch:
    """Sample a group of answers, with what is sent changed on the way."""
    asked, members = served.asked(), []
    async with served.engine() as (engine, between):
        await engine.generate(asked.token_ids, SamplingParams(max_new_tokens=1), request_id="a", images=asked.images)
        between.change = change
        params = [SamplingParams(max_new_tokens=12, seed=seed) for seed in range(4)]
        completions = await asyncio.gather(
            *(
                engine.generate(asked.token_ids, each, request_id=f"r{each.seed}", images=asked.images)
                for each in params
            )
        )
    for number, said in enumerate(completions):
        sample = make_sample(
            asked.token_ids.tolist(), said.token_ids.tolist(), logprobs=said.logprobs, index=number, rollout_id=number
        )
        spans = (VersionSpan(0, len(said.token_ids), 0),)
        members.append([replace(sample, images=asked.images, version_spans=spans)])
    return make_batch([make_group(0, members)], [1.0, -1.0] * 2)


def keep(served: Served) -> Change:
    return lambda body: None


def swap(served: Served) -> Change:
    return lambda body: body[served.pictures].reverse()


def remove(served: Served) -> Change:
    return lambda body: body[served.pictures].pop()


def double(served: Served) -> Change:
    def change(body: dict[str, Any]) -> None:
        name = "token_ids" if "token_ids" in body else "input_ids"
        mark = served.model.tokenizer.encode(served.model.pictures.mark, add_special_tokens=False)[0]
        body[name] = [each for token in body[name] for each in [token] * (2 if token == mark else 1)]
        body[served.pictures] = [each for each in body[served.pictures] for _ in range(2)]

    return change


def resize(served: Served) -> Change:
    def change(body: dict[str, Any]) -> None:
        small = uri(png(1, (28, 28)))
        body[served.pictures][0] = small if served.name == "sglang" else {"type": "image_url", "url": small}

    return change


async def test_logprobs_are_those_of_transformers_with_the_same_pictures(served: Served) -> None:
    batch = await answered(served, keep(served))
    trainer = served.trainer(most=1e-4)
    samples = [rollout.samples[0] for rollout in batch.groups[0].rollouts]
    for sample, logprobs in zip(samples, trainer.logprobs(samples), strict=True):
        assert np.abs(logprobs - sample.logprobs).max() < served.far
    assert trainer.train_step(batch).metrics["train/picture_mismatch_kl"] < 1e-4


FOUND_AT_ONCE = {
    ("vllm", remove): (PictureMismatchError, r"the server has made \d+ tokens of a prompt with pictures that are not"),
    ("vllm", double): (PictureMismatchError, r"the server has made \d+ tokens of a prompt with pictures that are not"),
    ("sglang", remove): (EngineProtocolError, "2 image placeholders but 1 image inputs"),
    ("sglang", resize): (PictureMismatchError, r"answers \d+ prompt tokens"),
}
"""What a server makes another number of tokens of, or refuses."""


@pytest.mark.parametrize("change", [remove, double, swap, resize])
async def test_pictures_that_change_on_the_way_change_no_weights(served: Served, change: Any) -> None:
    if found := FOUND_AT_ONCE.get((served.name, change)):
        kind, message = found
        with pytest.raises(kind, match=message):
            await answered(served, change(served))
        return
    batch = await answered(served, change(served))
    with pytest.raises(RunFailedError, match=r"have not seen the same pictures.*nothing was changed"):
        served.trainer(most=1e-4).train_step(batch)
