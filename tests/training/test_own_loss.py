"""Losses of users: ``train.loss.function`` beside the built-in ones, however a batch is packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollfeed.config.train import LossSettings
from rollfeed.errors import RunFailedError
from rollfeed.protocols import LossInputs
from rollfeed.training.trainer import Trainer
from rollfeed.types import VersionSpan


def _example() -> Callable[[LossInputs], Tensor]:
    """Return the function that docs/extending.md shows."""
    text = (Path(__file__).parents[2] / "docs/extending.md").read_text()
    section = text[text.index("\n## Losses") :]
    code, made = section.partition("```python\n")[2].partition("```")[0], dict[str, Any]()
    exec(compile(code, __file__, "exec"), made)
    found: Callable[[LossInputs], Tensor] = made["ppo_loss"]
    return found


clipped = _example()


def summed(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    loss_T = clipped(inputs)
    return (loss_T * inputs.weights_T).sum(), {"own": loss_T.detach() ** 2}


def with_metrics(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    loss_T = clipped(inputs)
    metrics = [("own", loss_T.detach() ** 2), ("a", inputs.mask_T)]
    return loss_T, dict(metrics[:: 1 if len(loss_T) % 2 else -1])  # in no particular order


def weights_after(trainer: Trainer, batches: list[Any]) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    reports = [dict(trainer.train_step(batch).metrics) for batch in batches]
    return {name: tensor.clone() for name, tensor in trainer.weights().items()}, reports


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0.0, atol=tolerance)


@pytest.mark.parametrize(
    "loss",
    [
        {},
        {"clip_high": 0.28, "dual_clip": 0.0, "normalisation": "sequence", "correction": "truncate"},
        {"kl_coefficient": 0.1, "entropy_coefficient": 0.01, "old_logprobs": "rollout"},
    ],
)
def test_a_function_that_is_the_built_in_loss_trains_the_same_bit_by_bit(
    loss: dict[str, Any], make_trainer: Callable[..., Trainer], batch_by_seed: Callable[..., Any]
) -> None:
    batches = [batch_by_seed(1), batch_by_seed(2)]
    options = {"num_epochs": 2, "num_minibatches": 2, "micro_batch_tokens": 64}
    plain, told = weights_after(make_trainer(loss=loss, **options), batches)
    own, own_told = weights_after(make_trainer(loss=loss, loss_function=clipped, **options), batches)
    assert_close(own, plain)
    for name in ("train/loss", "train/grad_norm", "train/mismatch_kl", "train/entropy"):
        assert [each[name] for each in own_told] == [each[name] for each in told]
    assert "train/clipped_low_ratio" not in own_told[0]


@pytest.mark.parametrize("function", [with_metrics, summed])
def test_packing_changes_neither_the_update_nor_the_metrics_of_a_function(
    function: Any, make_trainer: Callable[..., Trainer], batch_by_seed: Callable[..., Any]
) -> None:
    found = [
        weights_after(
            make_trainer(loss_function=function, optimizer={"learning_rate": 1e-2, "epsilon": 1.0}, **options),
            [batch_by_seed(3)],
        )
        for options in ({}, {"micro_batch_tokens": 16, "share_prompts": False})
    ]
    assert found[1][1][0]["train/micro_batches"] > found[0][1][0]["train/micro_batches"]
    assert_close(found[0][0], found[1][0], tolerance=2e-6)
    for name in ("train/loss", "train/loss_function/own"):
        assert found[0][1][0][name] == pytest.approx(found[1][1][0][name], abs=1e-5)
    assert found[0][1][0]["train/loss_function/own"] > 0


def test_a_function_is_handed_versions_boundaries_and_the_reference(
    make_trainer: Callable[..., Trainer],
    sample_of: Callable[..., Any],
    group_of: Callable[..., Any],
    batch_of: Callable[..., Any],
    tiny_checkpoint: Any,
) -> None:
    spans = (VersionSpan(0, 1, 3), VersionSpan(1, 3, 4))
    samples = [
        sample_of([1, 2], [3, 4, 5], mask=[1, 0, 1], logprobs=[-1.0, -2.0, -3.0], version_spans=spans),
        sample_of([1, 2], [6, 7], index=1, rollout_id=1, version_spans=(VersionSpan(0, 2, 4),)),
    ]
    batch, seen = batch_of([group_of(0, [[each] for each in samples])], [0.5, 0.0]), list[LossInputs]()

    def look(inputs: LossInputs) -> Tensor:
        seen.append(inputs)
        return -inputs.logprobs_T

    trainer = make_trainer(
        loss_function=look,
        reference=tiny_checkpoint,
        loss={"reference_checkpoint": str(tiny_checkpoint)},
    )
    trainer.train_step(batch)
    (inputs,) = seen  # samples without an advantage learn, too
    by_sample = {
        tuple(inputs.rollout_logprobs_T[inputs.sequence_ids_T == number].tolist()): number for number in (0, 1)
    }
    first = inputs.sequence_ids_T == by_sample[-1.0, -3.0]
    assert inputs.versions_T[first].tolist() == [3, 4]
    assert inputs.versions_T[~first].tolist() == [4, 4]
    assert inputs.advantages_T[first].tolist() == [0.5, 0.5]
    assert inputs.policy_version == 0
    torch.testing.assert_close(inputs.reference_logprobs_T, inputs.logprobs_T.detach())
    assert isinstance(inputs.settings, LossSettings)
    trainer.train_step(batch)
    assert seen[-1].policy_version == 1
    plain = make_trainer(loss_function=look)
    plain.train_step(batch)
    assert seen[-1].reference_logprobs_T is None


def _changes(inputs: LossInputs) -> Tensor:
    inputs.advantages_T.mul_(2)
    return -inputs.logprobs_T * inputs.advantages_T


def _unsteady() -> Callable[[LossInputs], Any]:
    calls: list[int] = []

    def function(inputs: LossInputs) -> Any:
        calls.append(1)
        return -inputs.logprobs_T, {f"metric{len(calls)}": inputs.mask_T}

    return function


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda inputs: None, r"returned None \(NoneType\), no tensor"),
        (lambda inputs: inputs.logprobs_T[:-1], r"shape \(\d+,\).*where T = \d+"),
        (lambda inputs: inputs.logprobs_T * 1j, r"of torch\.complex64 on cpu"),
        (lambda inputs: inputs.logprobs_T.to("meta"), r"on meta, where T = \d+ on cpu"),
        (lambda inputs: inputs.logprobs_T.detach(), "without a gradient"),
        (lambda inputs: (inputs.logprobs_T,), r"returned \(tensor\(.* \(tuple\), no tensor"),
        (lambda inputs: inputs.logprobs_T.mean(), "returned one number, and train.loss.correction = 'truncate'"),
        (lambda inputs: (inputs.logprobs_T, {"x": 1.0}), r"metric 'x', which is no tensor \(T,\)"),
        (lambda inputs: (inputs.logprobs_T, {"x": inputs.mask_T[:-1]}), r"metric 'x', which is no tensor \(T,\)"),
        (lambda inputs: (inputs.logprobs_T, {1: inputs.mask_T}), "metric 1, which is no tensor"),
        (lambda inputs: (inputs.logprobs_T, [1]), "returned metrics as list"),
        (lambda inputs: inputs.nothing, "AttributeError"),
        (lambda inputs: inputs.logprobs_T * float("nan"), r"the loss \(nan\) of the micro-batch with samples"),
        (_changes, "changed advantages_T in place"),
        (_unsteady(), r"returned the metrics \['metric2'\], and \['metric1'\] before"),
    ],
)
def test_what_is_no_loss_ends_the_run_with_the_functions_line_and_changes_nothing(
    function: Any, told: str, make_trainer: Callable[..., Trainer], batch_by_seed: Callable[..., Any]
) -> None:
    trainer = make_trainer(loss_function=function, micro_batch_tokens=16, loss={"correction": "truncate"})
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    with pytest.raises(RunFailedError, match=told) as caught:
        trainer.train_step(batch_by_seed(4))
    assert "train.loss.function (" in str(caught.value)
    assert "test_own_loss.py:" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_close(dict(trainer.weights()), before)


def test_an_entropy_bonus_is_what_a_function_of_the_entropy_is(
    make_trainer: Callable[..., Trainer], batch_by_seed: Callable[..., Any]
) -> None:
    batch, coefficient = batch_by_seed(5), 0.3
    plain, told = weights_after(make_trainer(loss={"entropy_coefficient": coefficient}), [batch])
    own, own_told = weights_after(
        make_trainer(loss_function=lambda inputs: clipped(inputs) - coefficient * inputs.entropy_T), [batch]
    )
    assert_close(plain, own)
    assert told[0]["train/loss"] == own_told[0]["train/loss"]
    without, told_without = weights_after(make_trainer(), [batch])
    # The loss is a mean over tokens here, and so is the entropy.
    bonus = told_without[0]["train/loss"] - told[0]["train/loss"]
    assert bonus == pytest.approx(coefficient * told[0]["train/entropy"], rel=0.2)
    assert any(not torch.equal(plain[name], without[name]) for name in plain)


def test_entropy_rises_with_the_bonus_where_no_sample_has_an_advantage(
    make_trainer: Callable[..., Trainer], batch_by_seed: Callable[..., Any]
) -> None:
    batch = batch_by_seed(6)
    still = type(batch)(
        step=0, policy_version=0, groups=batch.groups, advantages_S=np.zeros_like(batch.advantages_S), metrics={}
    )
    trainer = make_trainer(loss={"entropy_coefficient": 1.0}, optimizer={"learning_rate": 1e-3})
    entropies = [trainer.train_step(still).metrics["train/entropy"] for _ in range(4)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0]
