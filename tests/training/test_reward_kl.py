"""Divergence in rewards: the updates are those of the advantages that it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from rollfeed.batch import advantages_less_kl
from rollfeed.config.advantage import AdvantageEstimator, AdvantageSettings
from rollfeed.config.train import LossSettings
from rollfeed.errors import RunFailedError
from rollfeed.training.trainer import Trainer
from rollfeed.types import TrainBatch

SMOOTH = {"learning_rate": 0.05, "epsilon": 1.0, "max_grad_norm": 1e9}
COEFFICIENT = 0.7


def by(estimator: AdvantageEstimator) -> Any:
    return partial(advantages_less_kl, settings=AdvantageSettings(estimator=estimator))


def weights_of(trainer: Trainer) -> torch.Tensor:
    return torch.cat([each.flatten() for each in trainer.weights().values()]).clone()


def divergences(batch: TrainBatch, policy: Trainer, reference: Trainer) -> list[NDArray[np.float64]]:
    """Return log policy - log reference where it is trained on, 0 elsewhere."""
    return [
        own.astype(np.float64) - theirs
        for own, theirs in zip(policy.logprobs(batch.samples), reference.logprobs(batch.samples), strict=True)
    ]


@pytest.mark.parametrize(
    ("settings", "estimator"),
    [
        ({"micro_batch_tokens": 24}, AdvantageEstimator.REINFORCE_PP),
        ({"num_minibatches": 2, "num_epochs": 2}, AdvantageEstimator.GROUP_MEAN),
        ({"lora": {"rank": 4, "alpha": 8}, "share_prompts": False}, AdvantageEstimator.REINFORCE_PP),
    ],
)
def test_an_update_is_that_of_the_advantages_by_hand(
    settings: dict[str, Any], estimator: AdvantageEstimator, make_trainer, batch_by_seed
) -> None:
    loss = {"reward_kl_coefficient": COEFFICIENT}
    ours = make_trainer(optimizer=SMOOTH, loss=loss, advantages_less_kl=by(estimator), **settings)
    plain, start = make_trainer(optimizer=SMOOTH, **settings), make_trainer(**settings)
    batches: Sequence[TrainBatch] = [batch_by_seed(seed) for seed in range(3)]
    for batch in batches:
        kl_N = divergences(batch, ours, start)
        taken_N = [COEFFICIENT * each for each in kl_N]
        advantages_N = by(estimator)(batch, taken_N)
        metrics = ours.train_step(batch).metrics
        expected = plain.train_step(replace(batch, advantages_S=advantages_N)).metrics
        assert metrics["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-5)
        num_tokens = sum(np.count_nonzero(sample.loss_mask) for sample in batch.samples)
        num_rollouts = sum(len(group.rollouts) for group in batch.groups)
        total = sum(each.sum() for each in kl_N)
        assert metrics["train/reward_kl"] == pytest.approx(total / num_tokens, abs=1e-5)
        assert metrics["train/reward_kl_penalty"] == pytest.approx(COEFFICIENT * total / num_rollouts, abs=1e-5)
        torch.testing.assert_close(weights_of(ours), weights_of(plain), rtol=0, atol=2e-6)
    assert abs(metrics["train/reward_kl"]) > 1e-3
    assert metrics["train/reference_kl"] > 1e-3


def test_groups_of_equal_rewards_are_held_back_too(make_trainer, sample_of, group_of, batch_of) -> None:
    members = [[sample_of([1, 2], [3 + each, 9], reward=1.0, index=each, rollout_id=each)] for each in range(2)]
    batch = batch_of([group_of(0, members)], [0.0, 0.0])
    pushed = batch_of([group_of(0, members)], [1.0, -1.0])
    ours = make_trainer(loss={"reward_kl_coefficient": 5.0}, advantages_less_kl=by(AdvantageEstimator.GROUP_MEAN))
    away = make_trainer()
    away.train_step(pushed)
    state = away.state_dict()
    ours.load_state_dict(state)
    before = [each.sum() for each in ours.logprobs(batch.samples)]
    assert ours.train_step(batch).num_updates == 1
    after = [each.sum() for each in ours.logprobs(batch.samples)]
    assert after[0] - after[1] < before[0] - before[1]  # what had been made likelier is so no longer


@pytest.mark.parametrize(("estimator", "power"), [("k2", 2), ("k3", 3)])
def test_the_divergence_is_estimated_as_is_said(estimator: str, power: int, make_trainer, batch_by_seed) -> None:
    loss = {"reward_kl_coefficient": 0.1, "reward_kl_estimator": estimator}
    ours, start = make_trainer(loss=loss, advantages_less_kl=by(AdvantageEstimator.GROUP_MEAN)), make_trainer()
    ours.train_step(batch_by_seed(0))
    batch = batch_by_seed(1)
    ratios = np.concatenate(
        [
            each[sample.loss_mask != 0]
            for each, sample in zip(divergences(batch, ours, start), batch.samples, strict=True)
        ]
    )
    expected = 0.5 * ratios**2 if power == 2 else np.exp(-ratios) - 1 + ratios
    assert ours.train_step(batch).metrics["train/reward_kl"] == pytest.approx(expected.mean(), rel=1e-3)


def test_a_divergence_that_is_no_number_stops_before_anything_is_changed(make_trainer, batch_by_seed) -> None:
    trainer = make_trainer(
        loss={"reward_kl_coefficient": 0.1}, advantages_less_kl=by(AdvantageEstimator.GROUP_MEAN), on_non_finite="skip"
    )
    reference = trainer._reference
    assert reference is not None
    reference.tensors()["model.norm.weight"].fill_(torch.nan)
    before = weights_of(trainer)
    with pytest.raises(
        RunFailedError, match=r"step 1: the divergence of sample \d+ from the reference is not a number"
    ):
        trainer.train_step(batch_by_seed(1))
    assert torch.equal(before, weights_of(trainer))
    assert not trainer.is_mid_batch


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"reward_kl_coefficient": 0.1, "reward_kl_estimator": "k3+"}, "rewards have none: set k3"),
        ({"reward_kl_estimator": "k2"}, "reward_kl_estimator has no effect with reward_kl_coefficient = 0"),
    ],
)
def test_estimators_that_rewards_have_not_are_refused(loss: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LossSettings.model_validate(loss)
