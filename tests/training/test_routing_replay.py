"""The experts that tokens were sampled with, from the engine to the trainer's gradient."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollfeed.config import TinyModelSettings
from rollfeed.engine.local import create_local_engine
from rollfeed.engine.tiny import tiny_checkpoint as make_tiny_checkpoint
from rollfeed.errors import ConfigError
from rollfeed.model_files.expert_choices import Routers
from rollfeed.testing.prompts import CharTokenizer
from rollfeed.types import Completion, RoutedExperts, SamplingParams
from rollfeed.weights import write_checkpoint

PROMPT = np.arange(3, 12, dtype=np.int32)
SMALL = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    intermediate_size=32, moe_intermediate_size=16, bos_token_id=0, eos_token_id=0, pad_token_id=0,
)  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "one layer without experts": lambda: transformers.Qwen3MoeConfig(
        **SMALL, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[1]
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda: transformers.OlmoeConfig(**SMALL, num_experts=8, num_experts_per_tok=3),
    "gpt-oss": lambda: transformers.GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "groups": lambda: transformers.DeepseekV3Config(
        **(SMALL | dict(head_dim=8)), n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = TinyModelSettings(hidden_size=32, num_layers=3)
    return make_tiny_checkpoint(settings, seed=1, cache_directory=tmp_path_factory.mktemp("moe"), has_experts=True)


@pytest.fixture
def make_moe_trainer(make_trainer, checkpoint: Path) -> Callable[..., Any]:
    return partial(make_trainer, checkpoint=checkpoint, micro_batch_tokens=256)


def sampled(checkpoint: Path, **changes: Any) -> list[Completion]:
    """Return four answers of the embedded engine to one prompt, of several lengths."""
    engine = create_local_engine(
        checkpoint=checkpoint, tokenizer=CharTokenizer(), threads=1, num_slots=4, context_length=64,
        deterministic=False, device="cpu",
    )  # fmt: skip

    async def main() -> list[Completion]:
        async with engine:
            asks = [SamplingParams(max_new_tokens=7 + n, seed=n, return_routed_experts=True) for n in range(4)]
            asks = [replace(each, **changes) for each in asks]
            return await asyncio.gather(*(engine.generate(PROMPT, each, request_id=str(each.seed)) for each in asks))

    return asyncio.run(main())


@pytest.fixture
def batch(checkpoint: Path, sample_of, group_of, batch_of) -> Any:
    samples = [
        sample_of(
            PROMPT.tolist(), c.token_ids.tolist(), logprobs=c.logprobs, index=n, rollout_id=n,
            routed_experts=c.routed_experts,
        )
        for n, c in enumerate(sampled(checkpoint))
    ]  # fmt: skip
    return batch_of([group_of(0, [[each] for each in samples])], [1.0, -1.0, 0.5, -0.5])


def changed(batch: Any, change: Callable[[RoutedExperts], RoutedExperts | None]) -> Any:
    (group,) = batch.groups
    rollouts = [
        replace(each, samples=tuple(replace(s, routed_experts=change(s.routed_experts)) for s in each.samples))
        for each in group.rollouts
    ]
    return replace(batch, groups=(replace(group, rollouts=tuple(rollouts)),))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_routers_chose_is_chosen_again_with_gates_of_their_own(config: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config()).float().eval()
    routers = Routers(model)
    ids_BL = torch.arange(14).reshape(2, 7)
    with torch.no_grad(), routers.watching() as chosen:
        own = model(input_ids=ids_BL).logits
    assert len(chosen) == routers.num_layers
    experts_BLC = torch.stack([each.view(2, 7, -1) for each in chosen], 2).flatten(2)
    routers.replay(experts_BLC)
    assert torch.equal(model(input_ids=ids_BL).logits, own)
    other = (experts_BLC + 1) % routers.num_experts
    routers.replay(other)
    with routers.watching() as again:
        logits = model(input_ids=ids_BL).logits
    assert not again
    assert not torch.allclose(logits, own, atol=1e-6)
    logits.square().sum().backward()
    gates = [each for name, each in model.named_parameters() if "gate.weight" in name or "router.weight" in name]
    assert len(gates) == routers.num_layers
    assert all(float(each.grad.abs().sum()) > 0 for each in gates)
    routers.replay(None)
    assert torch.equal(model(input_ids=ids_BL).logits, own)


def test_the_engine_returns_the_experts_of_all_tokens_but_the_last(checkpoint: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    routers = Routers(model)
    for completion in sampled(checkpoint):
        routed = completion.routed_experts
        assert routed is not None
        assert (routed.width, routed.per_token) == (1, 6)
        ids = np.concatenate([PROMPT, completion.token_ids])[:-1]
        with torch.no_grad(), routers.watching() as chosen:
            model(input_ids=torch.from_numpy(ids.astype(np.int64))[None])
        assert np.array_equal(np.sort(routed.numbers.reshape(-1, 3, 2)), np.sort(torch.stack(chosen, 1).numpy()))
    assert all(each.routed_experts is None for each in sampled(checkpoint, return_routed_experts=False))


@pytest.mark.parametrize(
    "changes", [{}, {"share_prompts": False}, {"activation_checkpointing": True}, {"lora": {"rank": 2}}], ids=str
)
def test_replayed_experts_are_the_engines_whatever_the_trainer_would_choose(
    make_moe_trainer, checkpoint, batch, tmp_path, changes
) -> None:
    """With routers that choose otherwise, replay gives what a model says that is made to choose as the engine did."""
    plain, replaying = make_moe_trainer(**changes), make_moe_trainer(routing_replay=True, **changes)
    samples = batch.samples
    for trainer in (plain, replaying):
        for own, sample in zip(trainer.logprobs(samples), samples, strict=True):
            np.testing.assert_allclose(own, sample.logprobs, atol=1e-5)
    weights = {name: each.clone() for name, each in plain.weights().items()}
    for name in weights:
        if name.endswith("mlp.gate.weight"):
            weights[name] = -weights[name]
    write_checkpoint(weights, tmp_path / "turned", checkpoint=checkpoint)
    turned = make_moe_trainer(checkpoint=tmp_path / "turned", routing_replay=True, **changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "turned", dtype=torch.float32).eval()
    routers = Routers(model)
    for own, sample in zip(turned.logprobs(samples), samples, strict=True):
        routers.replay(torch.from_numpy(sample.routed_experts.numbers.astype(np.int64))[None])
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = model(input_ids=ids[None, :-1]).logits[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(own, logprobs[-sample.response_length :].numpy(), atol=1e-5)
        assert np.abs(own - sample.logprobs).max() > 1e-3
    before = {name: each.clone() for name, each in turned.weights().items()}
    assert turned.train_step(batch).num_updates == 1
    moved = {name for name, each in turned.weights().items() if not torch.equal(each, before[name])}
    # What an adapter leaves as it is computes with the experts of the engine as well.
    trained = "self_attn" if "lora" in changes else "mlp.gate"
    assert {name for name in before if trained in name and name.endswith(("gate.weight", "proj.weight"))} <= moved


def test_experts_that_do_not_fit_are_refused(make_moe_trainer, make_trainer, batch) -> None:
    trainer = make_moe_trainer(routing_replay=True)
    for change, message in (
        (lambda routed: None, "sample 0 has no routed_experts: sample it with"),
        (
            lambda routed: RoutedExperts.of(routed.numbers[:-1]),
            "experts of 14 tokens, and 15 are computed",
        ),
        (lambda routed: RoutedExperts.of(routed.numbers[:, :3]), "3 experts a token, the model 2 in 3 of 3 layers"),
        (lambda routed: RoutedExperts.of(routed.numbers + 300), "has expert 30., the model has 8"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer.train_step(changed(batch, change))
    assert trainer.step == 0
    with pytest.raises(ConfigError, match="routing_replay = true: it has no experts by its configuration; set it to f"):
        make_trainer(routing_replay=True)
