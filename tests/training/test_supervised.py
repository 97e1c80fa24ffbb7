"""Supervised updates: the gradient of the mean likelihood of response tokens, however it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.training.supervised import Demonstration, SupervisedUpdates
from rollfeed.training.trainer import Trainer

LEARNING_RATE = 0.01
EPSILON = 1e-8
VOCAB = 259


def demonstration(prompt_ids: list[int], response_ids: list[int]) -> Demonstration:
    return Demonstration(np.array(prompt_ids, np.int32), np.array(response_ids, np.int32))


@pytest.fixture
def demonstrations() -> list[Demonstration]:
    """Six of several lengths; two have one prompt."""
    rng = np.random.default_rng(7)
    made = [
        demonstration(rng.integers(0, VOCAB, rng.integers(1, 8)).tolist(), rng.integers(0, VOCAB, length).tolist())
        for length in (1, 3, 9, 2, 5)
    ]
    return [*made, demonstration(made[2].prompt_ids.tolist(), [5, 6, 7])]


@pytest.fixture
def make_updates(make_trainer: Callable[..., Trainer]) -> Callable[..., tuple[Trainer, SupervisedUpdates]]:
    def make(*, micro_batch_tokens: int = 1000, **settings: Any) -> tuple[Trainer, SupervisedUpdates]:
        trainer = make_trainer(**settings)
        updates = SupervisedUpdates(trainer.policy, learning_rate=LEARNING_RATE, micro_batch_tokens=micro_batch_tokens)
        return trainer, updates

    return make


def gradients_of_updates(updates: SupervisedUpdates, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Return a list that gets the gradients of every update, as AdamW is handed them before they are clipped."""
    found: list[dict[str, torch.Tensor]] = []
    optimizer = updates._optimizer
    step = optimizer.step

    def keep() -> float:
        found.append({name: parameter.grad.clone() for name, parameter in optimizer.parameters.items()})
        return step()

    monkeypatch.setattr(optimizer, "step", keep)
    return found


def expected_gradients(checkpoint: Path, demonstrations: list[Demonstration]) -> tuple[dict[str, torch.Tensor], float]:
    """From the formula: float64, one sequence at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    parts = []
    for prompt_ids, response_ids, _ in demonstrations:
        tokens = torch.tensor([*prompt_ids.tolist(), *response_ids.tolist()])
        logits = model(tokens[None]).logits[0]
        parts.append(
            torch.nn.functional.cross_entropy(
                logits[len(prompt_ids) - 1 : -1], tokens[len(prompt_ids) :], reduction="sum"
            )
        )
    loss = sum(parts) / sum(len(response_ids) for _, response_ids, _ in demonstrations)
    loss.backward()
    return {name: parameter.grad.float() for name, parameter in model.named_parameters()}, loss.item()


@pytest.mark.parametrize("micro_batch_tokens", [1000, 40, 16])
def test_the_gradient_is_that_of_the_mean_over_response_tokens(
    make_updates, tiny_checkpoint, demonstrations, monkeypatch, micro_batch_tokens: int
) -> None:
    _, updates = make_updates(micro_batch_tokens=micro_batch_tokens)
    found = gradients_of_updates(updates, monkeypatch)
    loss = updates.update(demonstrations)
    expected, expected_loss = expected_gradients(tiny_checkpoint, demonstrations)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert found[0].keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[0][name], gradient, rtol=0.0, atol=2e-5 * scale, msg=name)


def test_an_update_is_one_of_adamw_with_its_own_learning_rate(make_updates, tiny_checkpoint, demonstrations) -> None:
    trainer, updates = make_updates(optimizer={"learning_rate": 0.5, "weight_decay": 0.3})
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    updates.update(demonstrations)
    gradients, _ = expected_gradients(tiny_checkpoint, demonstrations)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    for name, tensor in trainer.weights().items():
        gradient = gradients[name] * min(1.0, 1.0 / norm)
        # A first step of AdamW is the sign of the gradient, but where the gradient is as small as its rounding.
        expected = before[name] - LEARNING_RATE * gradient / (gradient.abs() + EPSILON)
        clear = gradient.abs() > 1e-5
        assert clear.float().mean() > 0.01
        torch.testing.assert_close(tensor[clear], expected[clear], rtol=0.0, atol=1e-4 * LEARNING_RATE, msg=name)


def test_the_loss_falls(make_updates, demonstrations) -> None:
    _, updates = make_updates()
    losses = [updates.update(demonstrations) for _ in range(30)]
    assert losses[-1] < 0.2 * losses[0]


def test_the_trainer_has_no_part_in_it_but_its_model(make_updates, demonstrations) -> None:
    trainer, updates = make_updates()
    updates.update(demonstrations)
    state = trainer.state_dict()
    assert state.values["step"] == state.values["num_updates"] == 0
    assert not [name for name in state.tensors if name.startswith("exp_avg")]
    assert all(parameter.grad is None for parameter in trainer.policy.model.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_fails_the_run_and_leaves_the_weights(make_updates, demonstrations, value) -> None:
    trainer, updates = make_updates()
    with torch.no_grad():
        trainer.weights()["model.norm.weight"][3] = value
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    with pytest.raises(RunFailedError, match=r"supervised update: the loss .* or its gradient is not finite"):
        updates.update(demonstrations)
    for name, tensor in trainer.weights().items():
        torch.testing.assert_close(tensor, before[name], rtol=0.0, atol=0.0, equal_nan=True, msg=name)
    assert all(parameter.grad is None for parameter in trainer.policy.model.parameters())


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (([1, 2], [3, VOCAB]), f"token id {VOCAB} is outside the model's vocabulary of {VOCAB}"),
        (([VOCAB + 40, 2], [3]), f"token id {VOCAB + 40} is outside"),
        (([1] * 20, [2] * 22), r"train\.micro_batch_tokens = 40: sample 6 has 41 tokens"),
        (([1] * 1000, [2] * 30), "demonstration 6 has 1029 tokens, and the model that is trained takes at most 1024"),
        (([], [2, 3]), "its prompt has no tokens"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changed(make_updates, demonstrations, bad, expected: str) -> None:
    trainer, updates = make_updates(micro_batch_tokens=40)
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    with pytest.raises(ConfigError, match=expected):
        updates.update([*demonstrations, demonstration(*bad)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights().items())


def test_one_that_just_fits_is_taken(make_updates) -> None:
    _, updates = make_updates(micro_batch_tokens=40)
    assert math.isfinite(updates.update([demonstration([1] * 20, [2] * 21)]))
