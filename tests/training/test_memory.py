"""What saves memory or time changes no number: moments and activations that wait elsewhere, bf16, trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import linear
from torch.optim.optimizer import register_optimizer_step_post_hook

from rollfeed.config.train import TrainSettings
from rollfeed.model_files.products import is_onednn_faster
from rollfeed.training import optimizer as optimizing
from rollfeed.training.model import Policy, hold_linear_layers_as_computed, load_policy_model
from rollfeed.training.packing import TrainSequence, pack_sequences
from rollfeed.training.trainer import Trainer

MakeTrainer = Callable[..., Trainer]
VOCAB = 259
CPU = torch.device("cpu")


def weights_after(trainer: Trainer, batches: list[Any]) -> dict[str, torch.Tensor]:
    for batch in batches:
        trainer.train_step(batch)
    return {name: tensor.clone() for name, tensor in trainer.state_dict().tensors.items()}


def test_moments_that_the_cpu_keeps_make_the_same_updates(
    make_trainer: MakeTrainer, batch_by_seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [batch_by_seed(seed) for seed in range(3)]
    expected = weights_after(make_trainer(), batches)
    monkeypatch.setattr(optimizing, "_PART_ELEMENTS", 10_000)  # several parts
    trainer = make_trainer(optimizer={"learning_rate": 1e-2, "offload": True})
    parts: list[Any] = []
    with register_optimizer_step_post_hook(lambda adamw, *_: parts.append(adamw)):
        found = weights_after(trainer, batches[:2])
    assert len(parts) > 2  # of an update a batch
    again = make_trainer(optimizer={"learning_rate": 1e-2, "offload": True})
    again.load_state_dict(trainer.state_dict())
    for each in (trainer, again):
        found = weights_after(each, batches[2:])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_activations_that_the_cpu_keeps_bring_the_same_gradient(
    make_trainer: MakeTrainer, batch_by_seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [batch_by_seed(seed) for seed in range(2)]
    plain = weights_after(make_trainer(activation_checkpointing=True), batches)
    offloading = make_trainer(activation_checkpointing=True, activation_offload=True)
    assert offloading.policy.offloads
    passes: list[Any] = []
    own = torch.autograd.graph.save_on_cpu

    def save_on_cpu(**options: Any) -> Any:
        passes.append(options)
        return own(**options)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", save_on_cpu)
    found = weights_after(offloading, batches)
    assert passes
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    with pytest.raises(ValidationError, match="no effect without activation_checkpointing"):
        TrainSettings(activation_offload=True)


def test_a_reference_in_bf16_passes_is_held_in_bf16_and_says_the_same(tiny_checkpoint: Path) -> None:
    policy = Policy(load_policy_model(tiny_checkpoint, device=CPU), temperature=1.0, autocast=torch.bfloat16)
    ids = np.arange(40, dtype=np.int32)
    sequence = TrainSequence.of_tokens(ids, prompt_length=1, number=0)
    passes = pack_sequences([sequence], [sequence.mask_T], micro_batch_tokens=64, share_prompts=False)
    before = policy.score_each(passes)[0]
    policy.model.requires_grad_(False)
    hold_linear_layers_as_computed(policy)
    types = {name: parameter.dtype for name, parameter in policy.model.named_parameters()}
    assert {name for name, dtype in types.items() if dtype is torch.bfloat16} == {
        name
        for name in types
        if "_proj." in name  # not the embedding, which the head is tied to, nor norms
    }
    assert all(torch.equal(*each) for each in zip(policy.score_each(passes)[0][:2], before[:2], strict=True))


class Sensitive(torch.nn.Module):
    """A layer that is computed in the type of its weights, as routers are."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.linear(hidden.to(self.linear.weight.dtype))


@pytest.mark.parametrize("is_published", [False, True])
def test_layers_that_would_say_something_else_stay_as_they_are(is_published: bool, tiny_checkpoint: Path) -> None:
    policy = Policy(load_policy_model(tiny_checkpoint, device=CPU), temperature=1.0, autocast=torch.bfloat16)
    mlp = policy.model.model.layers[0].mlp
    mlp.up_proj = Sensitive(mlp.up_proj)
    policy.model.requires_grad_(False)
    if is_published:
        policy.model.bfloat16().float()
    before = {name: each.clone() for name, each in policy.model.named_parameters()}
    hold_linear_layers_as_computed(policy, is_published=is_published)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
    assert all(torch.equal(each, before[name]) for name, each in policy.model.named_parameters())


def test_compiled_layers_are_those_of_the_decoder(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[torch.nn.Module, Any]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compiled.append((module, options)))
    trainer = make_trainer(compile=True)
    assert [module for module, _ in compiled] == list(trainer.policy.model.model.layers)
    assert all(options == {"dynamic": True} for _, options in compiled)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_layers_are_not_compiled_again_for_each_shape(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    own = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: own(module, backend="eager", **options))
    reset()
    model = make_trainer(compile=True, share_prompts=False).policy.model
    counters.clear()
    for rows, length in ((4, 32), (8, 16), (3, 21), (2, 50), (1, 40), (6, 11), (1, 33)):
        ids = torch.arange(rows * length).reshape(rows, length) % VOCAB
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    assert 1 <= counters["stats"]["unique_graphs"] <= 2  # one row is a case of its own
    reset()


def test_trees_of_a_step_lie_behind_one_another_without_padding(make_trainer, batch_by_seed) -> None:
    trainer = make_trainer()
    assert trainer.policy.attends_in_blocks
    together = trainer.train_step(batch_by_seed(4)).metrics
    assert together["train/padded_tokens"] == together["train/computed_tokens"]
    alone = make_trainer(share_prompts=False)
    assert not alone.policy.attends_in_blocks
    metrics = alone.train_step(batch_by_seed(4)).metrics
    assert metrics["train/padded_tokens"] > metrics["train/computed_tokens"] > together["train/computed_tokens"]
    assert metrics["train/grad_norm"] == pytest.approx(together["train/grad_norm"], rel=1e-4)


@pytest.mark.skipif(not is_onednn_faster(), reason="oneDNN is no faster on this processor")
def test_what_a_trainer_computes_in_large_linear_layers_is_computed_by_onednn(make_trainer) -> None:
    inputs, weight = torch.randn(400, 256), torch.randn(256, 256, requires_grad=True)
    with make_trainer().policy.computing():
        assert type(linear(inputs, weight).grad_fn).__name__ == "_LinearBackward"
    assert type(linear(inputs, weight).grad_fn).__name__ != "_LinearBackward"
