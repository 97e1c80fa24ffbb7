"""The proof of published weights on real servers, with the real model: they pass, and a head left behind does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.servers import sglang_server, vllm_server

import rollfeed
from rollfeed.config.engine import OpenAISettings, SGLangSettings
from rollfeed.config.train import TrainSettings
from rollfeed.engine.backends.native.places import quantised
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import VLLM, SGLang
from rollfeed.errors import EngineProtocolError
from rollfeed.training.probe import rounding_of, score_texts, weight_types
from rollfeed.training.trainer import Trainer
from rollfeed.types import TensorUpdate, WeightProbe
from rollfeed.weights import DiskTransport, EngineProof

pytestmark = [pytest.mark.engines, pytest.mark.model, pytest.mark.timeout(1800)]

STEP = 1e-5
"""What AdamW changes a weight by in one update, at a learning rate of as much."""


class Publisher:
    """A trainer whose weights go a step at a time, and what it says of a few texts."""

    def __init__(self, model: Any) -> None:
        self.trainer = Trainer(
            model.checkpoint, settings=TrainSettings(threads=2), temperature=1.0, num_batches=1, max_response_length=8
        )
        text = "The largest of 12, 7 and 31 is 31, since it is greater than both of the others. "
        ids = model.tokenizer.encode(text, add_special_tokens=False)
        self.texts = tuple(np.roll(ids, -3 * number)[:20].astype(np.int32) for number in range(8))
        self._checkpoint = model.checkpoint
        self._signs = torch.Generator().manual_seed(0)

    def step(self, size: float) -> None:
        with torch.no_grad():
            for parameter in self.trainer.policy.model.parameters():
                signs = torch.randint(0, 2, parameter.shape, generator=self._signs) * 2 - 1
                parameter.add_(signs, alpha=size)

    def probe(self, precision: str) -> WeightProbe:
        types = weight_types(self._checkpoint, precision=precision, is_embedded=False)
        return WeightProbe(
            texts=self.texts,
            logprobs={
                name: score_texts(
                    self.trainer.policy,
                    self.texts,
                    rounding=rounding_of(name, to_int8=quantised),
                    micro_batch_tokens=1024,
                )
                for name in types
            },
        )

    async def publish(self, engine: Any, proof: EngineProof, version: int) -> None:
        await engine.apply(TensorUpdate(self.trainer.weights(), policy_version=version))
        await proof.prove(self.probe(engine.precision), policy_version=version)


@pytest.fixture(scope="module")
def model() -> Any:
    return rollfeed.load_model()


@pytest.fixture
def publisher(model: Any) -> Iterator[Publisher]:
    threads = torch.get_num_threads()
    yield Publisher(model)
    torch.set_num_threads(threads)


async def test_vllm_passes_and_a_tied_head_that_it_keeps_is_found_at_once(
    model: Any, publisher: Publisher, tmp_path: Path
) -> None:
    with vllm_server(model.checkpoint, tmp_path) as server:
        settings = OpenAISettings(base_url=server.address, request_timeout_seconds=600.0)
        transport = DiskTransport(checkpoint=model.checkpoint, untied_head=True)
        engine = ServerEngine(VLLM(settings), context_length=1000, tokenizer=model.tokenizer, transport=transport)
        proof = EngineProof(engine)
        async with engine:
            await publisher.publish(engine, proof, 0)
            for version in (1, 2):
                publisher.step(STEP)
                await publisher.publish(engine, proof, version)
                print(dict(proof.metrics()))
            assert proof.metrics()["weights/proof_slope"] == pytest.approx(1.0, abs=0.01)
            # As a folder is whose head is the embeddings' alone.
            transport._untied_head = False
            publisher.step(100 * STEP)
            with pytest.raises(EngineProtocolError, match="version 3 is not what it has") as caught:
                await publisher.publish(engine, proof, 3)
            print(caught.value)


async def test_sglang_passes_and_weights_that_it_keeps_are_found(
    model: Any, publisher: Publisher, tmp_path: Path
) -> None:
    with sglang_server(model.checkpoint, tmp_path) as server:
        settings = SGLangSettings(workers=(server.address,), startup_timeout_seconds=120.0, probe_timeout_seconds=120.0)
        engine = ServerEngine(
            SGLang(settings),
            context_length=1000,
            tokenizer=model.tokenizer,
            transport=DiskTransport(checkpoint=model.checkpoint),
        )
        proof = EngineProof(engine)
        async with engine:
            old = {name: tensor.clone() for name, tensor in publisher.trainer.weights().items()}
            await publisher.publish(engine, proof, 0)
            for version in (1, 2):
                publisher.step(100 * STEP)
                await publisher.publish(engine, proof, version)
                print(dict(proof.metrics()))
            publisher.step(100 * STEP)
            await engine.apply(TensorUpdate(old, policy_version=3))
            with pytest.raises(EngineProtocolError, match="version 3 is not what it has") as caught:
                await proof.prove(publisher.probe(engine.precision), policy_version=3)
            print(caught.value)
