"""An adapter alone on a real vLLM and a real SGLang: with it they say what the trainer says, version by version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.servers import sglang_server, vllm_server

from rollfeed.config.engine import OpenAISettings, SGLangSettings
from rollfeed.config.train import TrainSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import VLLM, SGLang
from rollfeed.protocols import TransportContext
from rollfeed.training.probe import rounding_of, score_texts, weight_types
from rollfeed.training.trainer import Trainer
from rollfeed.types import SamplingParams, TensorUpdate, WeightProbe
from rollfeed.weights import TRANSPORTS, EngineProof

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

RANK = 8
FLAGS = ("--enable-lora", "--max-lora-rank", str(RANK), "--lora-target-modules")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""vLLM would adapt the head, too, and then scores no texts on the CPU."""


class Publisher:
    """A trainer of an adapter that is changed a step at a time."""

    def __init__(self, policy: Path) -> None:
        settings = TrainSettings(device="cpu", threads=1, lora={"rank": RANK, "alpha": 16})
        self.trainer = Trainer(policy, settings=settings, temperature=1.0, num_batches=1, max_response_length=24)
        self._policy = policy
        self._random = torch.Generator().manual_seed(0)

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.trainer.policy.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=self._random), alpha=0.1)

    def said(self, texts: Any, name: str = "published") -> np.ndarray:
        rounding = rounding_of(name, to_int8=lambda weight: weight)
        return score_texts(self.trainer.policy, texts, rounding=rounding, micro_batch_tokens=512, merges=False)

    def probe(self, texts: Any, precision: str) -> WeightProbe:
        types = weight_types(self._policy, precision=precision, is_embedded=False)
        return WeightProbe(texts=texts, logprobs={name: self.said(texts, name) for name in types})


async def check_versions(engine: ServerEngine, policy: Path, *, far: float, prompts: Any) -> None:
    publisher, proof = Publisher(policy), EngineProof(engine)
    texts = tuple(np.random.default_rng(number).integers(3, 250, 24).astype(np.int32) for number in range(8))
    async with engine:
        told = await engine.score(texts)
        before = publisher.said(texts)
        assert all(np.abs(each - before).mean() < far for each in told.values())
        for version in (1, 2, 3):
            publisher.step()
            await engine.apply(TensorUpdate(publisher.trainer.weights(), policy_version=version))
            await proof.prove(publisher.probe(texts, engine.precision), policy_version=version)
            after = publisher.said(texts)
            assert np.abs(after - before).mean() > 10 * far
            assert all(np.abs(each - after).mean() < far for each in (await engine.score(texts)).values())
            # Also those that are sampled, on a prompt whose keys and values the last version has left in the cache.
            prompt = prompts
            answers = await asyncio.gather(
                *(
                    engine.generate(prompt, SamplingParams(max_new_tokens=16), request_id=f"{version}-{i}")
                    for i in range(3)
                )
            )
            for answer in answers:
                assert [span.policy_version for span in answer.version_spans] == [version]
                text = np.concatenate([prompt, answer.token_ids]).astype(np.int32)
                expected = publisher.said([text])[len(prompt) - 1 :]
                assert np.abs(np.asarray(answer.logprobs) - expected).mean() < far
            before = after
        metrics = engine.metrics()
        print(dict(proof.metrics()), metrics["weights_bytes"])
        assert proof.metrics()["weights/proof_slope"] == pytest.approx(1.0, abs=0.05)
        assert 0 < metrics["weights_bytes"] < 400_000  # the weights are 1.6 million


def transport_for(kind: str, policy: Path, folder: Path) -> Any:
    context = TransportContext(kind=kind, folder=folder, checkpoint=policy, untied_head=kind == "openai")
    return TRANSPORTS["adapter"](context)


async def test_vllm_takes_adapters_one_after_the_other(
    policy: Path, tokenizer: Any, prompts: Any, tmp_path: Path
) -> None:
    with vllm_server(policy, tmp_path, *FLAGS, *MODULES, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as server:
        settings = OpenAISettings(base_url=server.address, request_timeout_seconds=600.0)
        transport = transport_for("openai", policy, tmp_path / "weights")
        engine = ServerEngine(VLLM(settings), context_length=1000, tokenizer=tokenizer, transport=transport)
        await check_versions(engine, policy, far=2e-3, prompts=prompts(1)[0])


async def test_sglang_takes_adapters_one_after_the_other(
    policy: Path, tokenizer: Any, prompts: Any, tmp_path: Path
) -> None:
    with sglang_server(policy, tmp_path, *FLAGS, *MODULES, "--lora-backend", "torch_native") as server:
        settings = SGLangSettings(workers=(server.address,), startup_timeout_seconds=120.0, probe_timeout_seconds=120.0)
        transport = transport_for("sglang", policy, tmp_path / "weights")
        engine = ServerEngine(SGLang(settings), context_length=1000, tokenizer=tokenizer, transport=transport)
        await check_versions(engine, policy, far=0.02, prompts=prompts(1)[0])
