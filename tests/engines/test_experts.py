"""The experts of a real vLLM and a real SGLang: those that the model chooses, replayed by the trainer.

vLLM returns them from its second model runner, whose kernels Triton interprets here (``stand_ins_triton``). It serves
in fp32, SGLang in fp16.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
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
from rollfeed.model_files.expert_choices import Routers
from rollfeed.testing import sample_of
from rollfeed.training.trainer import Trainer
from rollfeed.types import Completion, Sample, SamplingParams, TensorUpdate
from rollfeed.weights import DiskTransport

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

RETURNS = "--enable-return-routed-experts"
INTERPRETED = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": str(Path(__file__).parent / "stand_ins_triton"),
}
LAYERS, EXPERTS, CHOSEN = 3, 8, 2


@pytest.fixture(scope="session")
def mixture(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of random weights, with the tokenizer of the other tests; its head is one of its own."""
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder, given = tmp_path_factory.mktemp("mixture") / "small", AutoConfig.from_pretrained(policy)
    shutil.copytree(policy, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "bos_token_id")
    config = Qwen3MoeConfig(
        **{name: getattr(given, name) for name in (*names, "eos_token_id", "max_position_embeddings")},
        intermediate_size=128, moe_intermediate_size=128, num_hidden_layers=LAYERS, num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, norm_topk_prob=True, tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def sample(prompt: np.ndarray, answer: Completion) -> Sample:
    ids = answer.token_ids.tolist()
    return sample_of(prompt.tolist(), ids, logprobs=answer.logprobs, routed_experts=answer.routed_experts)


def own_choices(trainer: Trainer, each: Sample) -> np.ndarray:
    """Experts that the trainer's model chooses itself, ``(N, layers, chosen)``, sorted."""
    routers = Routers(trainer.policy.model)
    with torch.no_grad(), routers.watching() as chosen:
        trainer.policy.model(input_ids=torch.from_numpy(each.token_ids[:-1].astype(np.int64))[None], use_cache=False)
    return np.sort(torch.stack(chosen, 1).numpy())


async def check_experts(
    engine: ServerEngine, mixture: Path, *, far: float, same: float, prompts: Any, interrupts: bool
) -> None:
    """Compare what is told with the model's own choices; then with new weights, or of an answer that was cut off."""

    def make(**settings: Any) -> Trainer:
        values = TrainSettings(device="cpu", threads=1, **settings)
        return Trainer(mixture, settings=values, temperature=1.0, num_batches=1, max_response_length=64)

    def check(prompt: np.ndarray, answer: Completion) -> None:
        assert answer.routed_experts is not None
        made, told = sample(prompt, answer), answer.routed_experts
        assert (told.num_tokens, told.per_token) == (len(made.token_ids) - 1, LAYERS * CHOSEN)
        is_same = np.sort(told.numbers.reshape(-1, LAYERS, CHOSEN)) == own_choices(plain, made)
        assert is_same.all(axis=-1).mean() >= same
        (own,) = replaying.logprobs([made])
        assert np.abs(own - answer.logprobs).mean() < far

    plain, replaying = make(), make(routing_replay=True)
    params = SamplingParams(max_new_tokens=32, seed=1, return_routed_experts=True)
    asked = prompts(4)
    async with engine:
        answers = await asyncio.gather(
            *(engine.generate(prompt, params, request_id=f"{number}") for number, prompt in enumerate(asked))
        )
        for prompt, answer in zip(asked, answers, strict=True):
            check(prompt, answer)
        if interrupts:
            prompt, long = asked[0], replace(params, max_new_tokens=200)
            under_way = asyncio.create_task(engine.generate(prompt, long, request_id="cut off"))
            async with asyncio.timeout(300):
                while engine.metrics()["tokens_in_flight"] < 10:
                    assert not under_way.done(), "it is over before anything could happen to it"
                    await asyncio.sleep(0.005)
            await engine.abort("cut off")
            begun = await under_way
            assert begun.routed_experts is None
            prompt = np.concatenate([prompt, begun.token_ids])
            check(prompt, await engine.generate(prompt, params, request_id="gone on with"))
            return
        generator = torch.Generator().manual_seed(1)
        for one, other in zip(*(each.policy.model.parameters() for each in (plain, replaying)), strict=True):
            one.data.add_(torch.randn(one.shape, generator=generator), alpha=0.05)
            other.data.copy_(one.data)
        await engine.apply(TensorUpdate(plain.weights(), policy_version=1))
        for prompt in asked:
            check(prompt, await engine.generate(prompt, params, request_id="new"))


async def test_vllm(mixture: Path, tokenizer: Any, prompts: Callable[[int], Any], tmp_path: Path) -> None:
    with vllm_server(mixture, tmp_path, RETURNS, "--enable-scale-out", **INTERPRETED) as server:
        settings = OpenAISettings(base_url=server.address, request_timeout_seconds=600.0, startup_timeout_seconds=120.0)
        transport = DiskTransport(checkpoint=mixture)
        engine = ServerEngine(VLLM(settings), context_length=1000, tokenizer=tokenizer, transport=transport)
        # After /collective_rpc reload_weights, also with equal weights, vLLM 0.32 chooses other experts on a CPU.
        await check_experts(engine, mixture, far=1e-4, same=1.0, prompts=prompts, interrupts=True)


async def test_sglang(mixture: Path, tokenizer: Any, prompts: Callable[[int], Any], tmp_path: Path) -> None:
    with sglang_server(mixture, tmp_path, RETURNS) as server:
        settings = SGLangSettings(workers=(server.address,), concurrency=16, startup_timeout_seconds=120.0)
        transport = DiskTransport(checkpoint=mixture)
        engine = ServerEngine(SGLang(settings), context_length=1000, tokenizer=tokenizer, transport=transport)
        await check_experts(engine, mixture, far=0.02, same=0.85, prompts=prompts, interrupts=False)
