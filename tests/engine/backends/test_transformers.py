"""Architectures that transformers generates for, on tiny random models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file

from rollfeed.engine.backends.replacement import check_replacement
from rollfeed.errors import CheckpointError, ConfigError, EngineError, EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Engine
from rollfeed.testing.prompts import CharTokenizer
from rollfeed.types import EngineLoad, FinishKind, FinishReason, SamplingParams, TensorUpdate
from rollfeed.weights import write_checkpoint

PROMPT = np.array([72, 101, 108, 108, 111], np.int32)
MakeEngine = Callable[..., Engine]


class NoEndTokenizer(CharTokenizer):
    """No id ends a response."""

    eos_token_ids: tuple[int, ...] = ()


CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=128, n_positions=512, n_embd=24, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        vocab_size=128,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    ),
}


@pytest.fixture(scope="session", params=CONFIGS)
def folder(request: pytest.FixtureRequest, save_tiny: Callable[[Any], Path]) -> Path:
    return save_tiny(CONFIGS[request.param]())


@pytest.fixture
def make_engine(folder: Path, make_tiny_engine: MakeEngine) -> MakeEngine:
    def make(**changes: Any) -> Engine:
        return make_tiny_engine(
            **{"checkpoint": folder, "tokenizer": NoEndTokenizer(), "context_length": 512, **changes}
        )

    return make


def params(max_new_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, **{"seed": 0, **changes})


async def until_running(engine: Engine, running: int, waiting: int = 0) -> None:
    while await engine.load() != EngineLoad(running, waiting):
        await engine.abort("nobody")  # takes one step of the engine


async def test_logprobs_equal_a_forward_pass_for_samples_of_several_prompts(
    folder: Path,
    make_engine: MakeEngine,
    load_reference: Callable[[Path], Any],
    reference_logprobs: Callable[..., list[NDArray[np.float32]]],
) -> None:
    prompts = [PROMPT, PROMPT, PROMPT[:2], PROMPT]
    async with make_engine() as engine:
        completions = await asyncio.gather(
            *(
                engine.generate(prompt, params(10 + seed, seed=seed), request_id=str(seed))
                for seed, prompt in enumerate(prompts)
            )
        )
    expected = reference_logprobs(load_reference(folder), prompts, completions)
    for number, completion in enumerate(completions):
        assert len(completion.token_ids) == 10 + number
        assert completion.finish_reason == FinishReason(FinishKind.LENGTH)
        np.testing.assert_allclose(completion.logprobs, expected[number], atol=1e-4)
    assert len({completion.token_ids[:10].tobytes() for completion in completions}) == 4


async def test_a_seed_gives_one_response_alone_and_beside_others(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        alone = await engine.generate(PROMPT, params(12, seed=5, top_k=30), request_id="r")
        beside = await asyncio.gather(
            *(engine.generate(PROMPT, params(12, seed=seed, top_k=30), request_id="r") for seed in (4, 5, 6))
        )
    assert beside[1].token_ids.tolist() == alone.token_ids.tolist()


async def test_stop_ids_and_stop_strings_end_single_rows(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        free = await engine.generate(PROMPT, params(20), request_id="r")
        token, string = int(free.token_ids[4]), free.text[7:9]
        by_id, by_string, whole = await asyncio.gather(
            engine.generate(PROMPT, params(20, stop_token_ids=(token,)), request_id="r"),
            engine.generate(PROMPT, params(20, stop=(string,)), request_id="r"),
            engine.generate(PROMPT, params(20), request_id="r"),
        )
    assert by_id.finish_reason == FinishReason(FinishKind.STOP, token)
    assert by_string.text == free.text[: free.text.index(string) + 2]
    assert whole.token_ids.tolist() == free.token_ids.tolist()


async def test_abort_returns_what_a_request_has_and_leaves_the_others(make_engine: MakeEngine) -> None:
    async with make_engine(num_slots=2) as engine:
        long = asyncio.create_task(engine.generate(PROMPT, params(500), request_id="long"))
        short = asyncio.create_task(engine.generate(PROMPT, params(60), request_id="short"))
        waiting = asyncio.create_task(engine.generate(PROMPT, params(5), request_id="waiting"))
        await until_running(engine, 2, 1)
        await engine.abort("waiting")
        assert len((await waiting).token_ids) == 0
        await short
        await engine.abort("long")
        aborted = await long
        after = await engine.generate(PROMPT, params(3), request_id="after")
    assert aborted.finish_reason.kind is FinishKind.ABORT
    assert 60 <= len(aborted.token_ids) < 500
    assert len(short.result().token_ids) == 60
    assert len(after.token_ids) == 3


async def test_a_cancelled_caller_makes_room(make_engine: MakeEngine) -> None:
    async with make_engine(num_slots=1) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, params(500), request_id="r"))
        await until_running(engine, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        completion = await engine.generate(PROMPT[:3], params(3), request_id="next")
    assert len(completion.token_ids) == 3


async def test_weights_change_and_requests_pause_between_two_tokens(
    folder: Path,
    make_engine: MakeEngine,
    load_reference: Callable[[Path], Any],
) -> None:
    state = load_reference(folder).state_dict()
    async with make_engine() as engine:
        task = asyncio.create_task(engine.generate(PROMPT, params(500), request_id="r"))
        await until_running(engine, 1)
        await engine.pause()
        with pytest.raises(EngineProtocolError, match="no weight of this name"):
            await engine.apply(TensorUpdate({"nonsense": np.ones(3, np.float32)}, policy_version=1))
        await engine.apply(TensorUpdate({name: tensor * 0.9 for name, tensor in state.items()}, policy_version=2))
        assert not task.done()
        await engine.resume()
        completion = await task
        assert engine.policy_version == 2
    assert completion.version_spans[-1].policy_version == 2
    assert completion.version_spans[-1].end == len(completion.token_ids) == 500


async def test_experts_and_buffers_are_replaced_by_the_names_of_the_checkpoint(
    save_tiny: Callable[[Any], Path],
    make_tiny_engine: MakeEngine,
    load_reference: Callable[[Path], Any],
    reference_logprobs: Callable[..., list[NDArray[np.float32]]],
    tmp_path: Path,
) -> None:
    config = transformers.DeepseekV3Config(
        vocab_size=128,
        hidden_size=24,
        intermediate_size=40,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = save_tiny(config)
    random = np.random.default_rng(1)
    tensors = {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    changed = {
        name: values + random.normal(0, 0.1, values.shape).astype(np.float32) for name, values in tensors.items()
    }
    expert, router = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {expert, router} <= changed.keys()
    write_checkpoint(changed, tmp_path / "changed", checkpoint=folder)
    async with make_tiny_engine(checkpoint=folder, tokenizer=NoEndTokenizer()) as engine:
        await engine.apply(TensorUpdate(changed, policy_version=1))
        completion = await engine.generate(PROMPT, params(12), request_id="r")
        assert await engine.read_weight(expert, num_rows=1) == changed[expert][:1].tolist()
        with pytest.raises(
            EngineProtocolError, match=rf"weight '{expert}': its shape is \(2, 2\), the model's \(8, 24\)"
        ):
            await engine.apply(TensorUpdate({expert: np.ones((2, 2), np.float32)}, policy_version=2))
        await engine.apply(TensorUpdate({expert: tensors[expert]}, policy_version=2))
        assert await engine.read_weight(expert, num_rows=1) == tensors[expert][:1].tolist()
        assert await engine.read_weight(expert.replace("3.up", "2.up"), num_rows=1) != tensors[expert][:1].tolist()
    [expected] = reference_logprobs(load_reference(tmp_path / "changed"), [PROMPT], [completion])
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_tables_of_whole_numbers_are_replaced_by_whole_numbers() -> None:
    shapes, ties = {"table": (2,), "weight": (2,)}, {"table": 0, "weight": 1}
    whole, real = np.array([3, 1]), np.array([0.5, 1.0], np.float32)
    check = partial(check_replacement, shapes, ties, complete=True, dtype=torch.float32, whole_numbers={"table"})
    assert check({"table": whole, "weight": real}) == ["table", "weight"]
    with pytest.raises(EngineProtocolError, match=r"'table': its values are torch\.float32, not whole numbers"):
        check({"table": real, "weight": real})
    with pytest.raises(EngineProtocolError, match=r"'weight': its values are torch\.int64, not floating point"):
        check({"table": whole, "weight": whole})


def test_a_model_that_cannot_be_sampled_from_is_refused_before_anything_starts(
    save_tiny: Callable[[Any], Path], make_tiny_engine: MakeEngine
) -> None:
    folder = save_tiny(
        transformers.BertConfig(
            vocab_size=128, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2
        )
    )
    with pytest.raises(CheckpointError, match="not a model to sample from and train: it is not causal"):
        make_tiny_engine(checkpoint=folder)


def test_a_text_is_not_longer_than_a_model_says_the_same_of_it_at_once_and_token_by_token(
    save_tiny: Callable[[Any], Path], make_tiny_engine: MakeEngine
) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 3, "long_factor": [4.0] * 3}
    folder = save_tiny(
        transformers.Phi3Config(
            vocab_size=128,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            original_max_position_embeddings=64,
            pad_token_id=0,
            rope_parameters={**rope, "original_max_position_embeddings": 64},
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    with pytest.raises(
        ConfigError, match=r"engine\.context_length = 65: .*all positions of the model change.*at most 64"
    ):
        make_tiny_engine(checkpoint=folder, context_length=65)
    make_tiny_engine(checkpoint=folder, context_length=64)


async def test_leaving_ends_a_generation_and_fails_it(make_engine: MakeEngine) -> None:
    async with make_engine(num_slots=1) as engine:
        tasks = [asyncio.create_task(engine.generate(PROMPT, params(500), request_id="r")) for _ in range(2)]
        await until_running(engine, 1, 1)
    for task in tasks:
        with pytest.raises(EngineUnavailableError):
            await task


async def test_output_that_is_not_finite_fails_the_request(
    folder: Path, make_engine: MakeEngine, load_reference: Callable[[Path], Any]
) -> None:
    state = load_reference(folder).state_dict()
    huge = {name: tensor * 1e30 for name, tensor in state.items() if "norm" in name or "ln_" in name}
    async with make_engine() as engine:
        await engine.apply(TensorUpdate(huge, policy_version=1))
        with pytest.raises(EngineError, match="not finite"):
            await engine.generate(PROMPT, params(3), request_id="r")
        await engine.health()


async def test_deterministic_answers_one_request_at_a_time(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True)
    assert engine.max_running_requests == 1
    async with engine:
        alone = await engine.generate(PROMPT, params(8, seed=2), request_id="r")
        beside = await asyncio.gather(
            *(engine.generate(PROMPT, params(8, seed=seed), request_id="r") for seed in (1, 2, 3))
        )
    assert beside[1].logprobs.tobytes() == alone.logprobs.tobytes()


async def test_weights_that_are_not_whole_are_refused_before_the_start(
    folder: Path, tmp_path: Path, make_engine: MakeEngine
) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut short or no safetensors file"):
        make_engine(checkpoint=tmp_path)
