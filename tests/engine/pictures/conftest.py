"""Servers that see: the embedded one with a tiny model, and what tampers with pictures on the way to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web
from tests.engine.pictures.seeing import FAST, SETTINGS, Tampering, png

from rollfeed.app.model import Model, load_model
from rollfeed.base.serving import serve_application
from rollfeed.config.engine import OpenAISettings, SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import VLLM, SGLang
from rollfeed.engine.local import create_local_engine
from rollfeed.engine.server import ServedModel, Service, serve
from rollfeed.engine.tiny_vision import tiny_vision_checkpoint
from rollfeed.prompts import ChatRenderer
from rollfeed.protocols import Rendered


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tiny_vision_checkpoint(SETTINGS, seed=0, cache_directory=tmp_path_factory.mktemp("vision"))
    return load_model(str(folder))


@pytest.fixture
def ask(vision_model: Model) -> Callable[..., Rendered]:
    """Render a text with pictures by their seeds."""
    renderer = ChatRenderer(vision_model.tokenizer, rollout_max_prompt_len=None, **vision_model.picture_input._asdict())

    def render(text: str, *seeds: int) -> Rendered:
        images = [vision_model.loader.load(png(seed)) for seed in seeds]
        return renderer.render(text, apply_chat_template=True, images=images)

    return render


@pytest.fixture
def serving(vision_model: Model) -> Callable[..., AbstractAsyncContextManager[Tampering]]:
    """Serve the tiny model by the embedded server, behind something that can tamper."""

    @asynccontextmanager
    async def start(context_length: int = 128) -> AsyncIterator[Tampering]:
        engine = create_local_engine(
            checkpoint=vision_model.checkpoint,
            tokenizer=vision_model.tokenizer,
            threads=1,
            num_slots=4,
            context_length=context_length,
            deterministic=False,
            pictures=vision_model.pictures,
        )
        served = ServedModel(model_path="tiny", name="tiny", created=0, config={}, max_waiting=16)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(engine)
            service = Service(
                engine, tokenizer=vision_model.tokenizer, model=served, picture_input=vision_model.picture_input
            )
            between = Tampering(await stack.enter_async_context(serve(service, host="127.0.0.1", port=0)))
            application = web.Application(client_max_size=1 << 28)
            application.router.add_route("*", "/{path:.*}", between.handle)
            between.address = await stack.enter_async_context(serve_application(application, host="127.0.0.1", port=0))
            yield between

    return start


@pytest.fixture
def sglang_at(vision_model: Model) -> Callable[[str], ServerEngine]:
    def make(address: str) -> ServerEngine:
        return ServerEngine(
            SGLang(SGLangSettings(workers=[address], concurrency=8, **FAST)),
            context_length=128,
            tokenizer=vision_model.tokenizer,
            pictures=vision_model.pictures,
        )

    return make


@pytest.fixture
def vllm_at(vision_model: Model) -> Callable[[str], ServerEngine]:
    def make(address: str) -> ServerEngine:
        return ServerEngine(
            VLLM(OpenAISettings(base_url=address, concurrency=8, **FAST)),
            context_length=128,
            tokenizer=vision_model.tokenizer,
            pictures=vision_model.pictures,
        )

    return make
