"""The load-balancing loss of a mixture of experts, from transformers' own to the trainer's gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.training.test_routing_replay import CONFIGS
from transformers.models.mixtral import modeling_mixtral

from rollfeed.config import TinyModelSettings
from rollfeed.engine.tiny import tiny_checkpoint as make_tiny_checkpoint
from rollfeed.errors import ConfigError
from rollfeed.model_files import read_headers
from rollfeed.model_files.expert_choices import BalanceMeter, Routers
from rollfeed.model_files.low_rank import AdaptedNames
from rollfeed.training.supervised import Demonstration, SupervisedUpdates

COEFFICIENT = 0.5
EVEN = {"loss": {"router_aux_loss_coefficient": COEFFICIENT}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = TinyModelSettings(hidden_size=32, num_layers=2)
    return make_tiny_checkpoint(settings, seed=1, cache_directory=tmp_path_factory.mktemp("moe"), has_experts=True)


@pytest.fixture
def make_moe_trainer(make_trainer, checkpoint: Path) -> Callable[..., Any]:
    return partial(make_trainer, checkpoint=checkpoint, micro_batch_tokens=256, share_prompts=False)


@pytest.fixture
def batch(sample_of, group_of, batch_of) -> Any:
    """One group, of which one answer has no advantage."""
    rng = np.random.default_rng(0)
    samples = [
        sample_of([3, 9, 4, 17], rng.integers(2, 40, length).tolist(), index=n, rollout_id=n)
        for n, length in enumerate((9, 6, 4, 7))
    ]
    return batch_of([group_of(0, [[each] for each in samples])], [1.0, -1.0, 0.5, 0.0])


def with_advantages(batch: Any, value: float) -> Any:
    return replace(batch, advantages_S=np.full(len(batch.samples), value, np.float32))


def loss_of_transformers(checkpoint: Path, texts: list[list[int]]) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    width = max(map(len, texts))
    ids_BL = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    mask_BL = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    with torch.no_grad():
        return float(model(input_ids=ids_BL, attention_mask=mask_BL, output_router_logits=True).aux_loss)


@pytest.mark.parametrize("name", [each for each in CONFIGS if each not in ("groups", "one layer without experts")])
def test_loss_and_gradient_are_those_of_transformers(name: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).float().eval()
    meter = BalanceMeter(model)
    ids_BL = torch.arange(21).reshape(3, 7)
    mask_BL = torch.ones(3, 7, dtype=torch.bool)
    mask_BL[1, 4:] = mask_BL[2, 6:] = False
    gates = [each for name, each in model.named_parameters() if "gate.weight" in name or "router.weight" in name]
    expected = model(input_ids=ids_BL, attention_mask=mask_BL.long(), output_router_logits=True).aux_loss
    theirs = torch.autograd.grad(expected, gates)
    model(input_ids=ids_BL)
    balance = meter.read(mask_BL)
    torch.testing.assert_close(balance.loss, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(balance.loss, gates), theirs, rtol=0, atol=1e-6)
    routers = Routers(model)
    with routers.watching() as chosen, torch.no_grad():
        model(input_ids=ids_BL)
    for load_X, choices in zip(balance.load_EX, chosen, strict=True):
        own = np.bincount(choices[mask_BL.flatten()].flatten(), minlength=routers.num_experts)
        np.testing.assert_allclose(load_X, own * routers.num_experts / own.sum(), rtol=1e-6)


def test_each_micro_batch_has_its_loss_weighted_as_its_tokens_are(make_moe_trainer, checkpoint, batch) -> None:
    without = make_moe_trainer().train_step(batch).metrics
    texts = [sample.token_ids[:-1].tolist() for sample in batch.samples]
    lengths = [sample.response_length for sample in batch.samples]
    whole = make_moe_trainer(**EVEN).train_step(batch).metrics
    expected = loss_of_transformers(checkpoint, texts)
    assert whole["train/micro_batches"] == 1
    assert whole["train/router_aux_loss"] == pytest.approx(expected, abs=1e-6)
    assert whole["train/loss"] - without["train/loss"] == pytest.approx(COEFFICIENT * expected, abs=1e-6)
    assert 0 <= whole["train/expert_load_min"] < 1 < whole["train/expert_load_max"] <= 4
    assert "train/router_aux_loss" not in without
    single = make_moe_trainer(**EVEN, micro_batch_tokens=12).train_step(batch).metrics
    each = [loss_of_transformers(checkpoint, [text]) for text in texts]
    expected = float(np.average(each, weights=lengths))
    assert single["train/micro_batches"] == 4
    assert single["train/router_aux_loss"] == pytest.approx(expected, abs=1e-6)
    assert single["train/loss"] - without["train/loss"] == pytest.approx(COEFFICIENT * expected, abs=1e-6)


def test_prompts_that_are_computed_once_count_once_and_padding_does_not(
    make_moe_trainer, checkpoint, sample_of, group_of, batch_of
) -> None:
    """Two groups of other lengths are two rows with branches."""
    groups, expected = [], []
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for number, (prompt, answers) in enumerate([([3, 9, 4, 17], [[5, 6, 7, 8], [9, 2]]), ([7, 8], [[3, 4], [5, 9]])]):
        samples = [
            sample_of(prompt, each, index=2 * number + n, rollout_id=2 * number + n) for n, each in enumerate(answers)
        ]
        groups.append(group_of(number, [[each] for each in samples]))
        for place, answer in enumerate(answers):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + answer[:-1]]), output_router_logits=True).router_logits
            expected.append([each[len(prompt) if place else 0 :] for each in logits])
    layers = tuple(torch.cat(each) for each in zip(*expected, strict=True))
    experts, chosen = model.config.num_experts, model.config.num_experts_per_tok
    loss = modeling_mixtral.load_balancing_loss_func(layers, experts, chosen)
    figures = make_moe_trainer(**EVEN, share_prompts=True).train_step(batch_of(groups, [1.0, -1.0, 0.5, -0.5])).metrics
    assert figures["train/micro_batches"] == 1
    assert figures["train/computed_tokens"] == len(layers[0]) == 12
    assert figures["train/router_aux_loss"] == pytest.approx(float(loss), abs=1e-6)


@pytest.mark.parametrize(
    "changes", [{"activation_checkpointing": True}, {"share_prompts": True}, {"lora": {"rank": 2}}], ids=str
)
def test_routers_become_more_even(make_moe_trainer, batch, changes) -> None:
    """Without advantages nothing else moves the weights; a prompt that is computed once counts once."""
    flat = with_advantages(batch, 0.0)
    trainer = make_moe_trainer(**EVEN, optimizer={"learning_rate": 1e-3}, **changes)
    figures = [trainer.train_step(flat).metrics for _ in range(8)]
    assert figures[0]["train/updates"] == 1
    losses = [each["train/router_aux_loss"] for each in figures]
    assert min(losses) < losses[0] - 0.01
    if changes == {"activation_checkpointing": True}:
        plain = make_moe_trainer(**EVEN, optimizer={"learning_rate": 1e-3})
        assert [plain.train_step(flat).metrics["train/router_aux_loss"] for _ in range(8)] == pytest.approx(losses)


def test_demonstrations_are_balanced_too(make_moe_trainer, checkpoint, batch) -> None:
    loss, batch = {"objective": "cross_entropy"}, with_advantages(batch, 1.0)
    without = make_moe_trainer(loss=loss).train_step(batch).metrics
    with_it = make_moe_trainer(loss={**loss, **EVEN["loss"]}).train_step(batch).metrics
    expected = loss_of_transformers(checkpoint, [each.token_ids[:-1].tolist() for each in batch.samples])
    assert with_it["train/loss"] - without["train/loss"] == pytest.approx(COEFFICIENT * expected, abs=1e-6)


def test_answers_that_nobody_sampled_choose_their_experts_themselves(make_moe_trainer) -> None:
    demonstration = Demonstration(np.array([3, 4, 5], np.int32), np.array([6, 7], np.int32))
    losses = []
    for replays in (False, True):
        policy = make_moe_trainer(routing_replay=replays).policy
        losses.append(SupervisedUpdates(policy, learning_rate=1e-3, micro_batch_tokens=64).update([demonstration]))
    assert losses[0] == losses[1]


def test_models_without_such_routers_are_refused(make_trainer) -> None:
    with pytest.raises(ConfigError, match=r"router_aux_loss_coefficient = 0\.5: it has no experts .*; set it to 0"):
        make_trainer(**EVEN)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["groups"]())
    with pytest.raises(ValueError, match="transformers computes no load-balancing loss of it"):
        BalanceMeter(model)
    with pytest.raises(ValueError, match="looks into routers: set compile = false"):
        make_trainer(**EVEN, compile=True)


def test_adapters_of_a_mixture_are_of_the_layers_beside_its_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = CONFIGS["one layer without experts"]()
    transformers.AutoModelForCausalLM.from_config(given).save_pretrained(tmp_path)
    own = {"rank": 2, "alpha": 4}

    def adapted(target_modules: list[str]) -> AdaptedNames:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        return AdaptedNames(model, read_headers(tmp_path), target_modules=target_modules, **own)

    names = {name.split(".")[-3] for name in adapted(["all-linear"]).adapter()}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ConfigError, match="'gate_proj': is taken for a layer of experts, which are not adapted"):
        adapted(["gate_proj", "up_proj", "down_proj"])
