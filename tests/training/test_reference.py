"""What divergence is measured from: refreshed by the policy, and the same again when a training goes on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rollfeed.config.train import TrainSettings
from rollfeed.errors import CheckpointError
from rollfeed.training.trainer import Trainer
from rollfeed.weights import write_checkpoint

REFRESHED = {"kl_coefficient": 0.1, "reference_refresh_interval": 2}
MIXED = {**REFRESHED, "reference_mixup_alpha": 0.25}
LORA = {"rank": 4, "alpha": 8}


def copies(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def reference_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer._reference is not None
    return copies(trainer._reference.tensors())


def policy_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in trainer.policy.model.named_parameters()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def divergences(trainer: Trainer, batches: list[Any]) -> list[float]:
    return [trainer.train_step(batch).metrics["train/reference_kl"] for batch in batches]


@pytest.mark.parametrize("lora", [None, LORA])
def test_every_second_batch_the_reference_becomes_the_policy(lora: Any, make_trainer, batch_by_seed) -> None:
    trainer, kept = (
        make_trainer(lora=lora, loss={**REFRESHED, "reference_refresh_interval": interval}) for interval in (2, 0)
    )
    batches = [batch_by_seed(seed) for seed in range(5)]
    found = divergences(trainer, batches)
    assert [number for number, each in enumerate(found) if abs(each) < 1e-9] == [0, 2, 4]
    assert divergences(kept, batches)[2] > 1e-4


def test_a_mixed_reference_has_its_share_of_the_policy(make_trainer, batch_by_seed) -> None:
    trainer = make_trainer(loss=MIXED)
    start = policy_of(trainer)
    for seed in range(2):
        assert_equal(reference_of(trainer), start)
        trainer.train_step(batch_by_seed(seed))
    first = {name: 0.75 * start[name] + 0.25 * each for name, each in policy_of(trainer).items()}
    for name, each in reference_of(trainer).items():  # a tied weight is mixed once
        torch.testing.assert_close(each, first[name], rtol=0, atol=1e-6)
    for seed in range(2):
        trainer.train_step(batch_by_seed(seed))
    for name, each in reference_of(trainer).items():
        mixed = 0.75 * first[name] + 0.25 * policy_of(trainer)[name]
        torch.testing.assert_close(each, mixed, rtol=0, atol=1e-6)


def test_a_reference_that_was_given_follows_too(make_trainer, batch_by_seed, tiny_checkpoint, tmp_path) -> None:
    other = make_trainer()
    other.train_step(batch_by_seed(5))
    write_checkpoint(other.weights(), tmp_path / "reference", checkpoint=tiny_checkpoint)
    trainer = make_trainer(reference=tmp_path / "reference", loss=REFRESHED)
    trainer.take_as_reference()
    found = divergences(trainer, [batch_by_seed(seed) for seed in range(3)])
    assert found[0] > 1e-4
    assert abs(found[2]) < 1e-9


@pytest.mark.parametrize(
    ("stop", "settings"),
    [(1, {"loss": MIXED}), (2, {"loss": MIXED}), (3, {"loss": REFRESHED, "lora": LORA}), (3, {"loss": REFRESHED})],
)
def test_a_training_that_goes_on_has_the_same_reference_bit_by_bit(
    stop: int, settings: dict[str, Any], make_trainer, batch_by_seed, tmp_path: Path
) -> None:
    batches = [batch_by_seed(seed) for seed in range(4)]
    whole, first, second = (make_trainer(num_epochs=2, **settings) for _ in range(3))
    expected = [whole.train_step(batch).metrics for batch in batches]
    got = [first.train_step(batch).metrics for batch in batches[:stop]]
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    got += [second.train_step(batch).metrics for batch in batches[stop:]]
    assert got == expected
    assert_equal(policy_of(second), policy_of(whole))
    assert_equal(reference_of(second), reference_of(whole))


def test_a_refreshed_reference_is_bf16_where_passes_are_and_goes_on_so(make_trainer, batch_by_seed, tmp_path) -> None:
    one, two = (make_trainer(precision="bf16", loss=REFRESHED) for _ in range(2))
    for seed in range(2):
        one.train_step(batch_by_seed(seed))
    assert {each.dtype for each in reference_of(one).values()} == {torch.float32, torch.bfloat16}
    one.save(tmp_path / "state")
    two.load(tmp_path / "state")
    assert_equal(reference_of(one), reference_of(two))
    assert one.train_step(batch_by_seed(2)).metrics["train/reference_kl"] == 0.0
    mixed = make_trainer(precision="bf16", loss=MIXED)  # small shares would be rounded away
    assert {each.dtype for each in reference_of(mixed).values()} == {torch.float32}


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_state_of_before_a_refresh_has_the_reference_of_then(lora: Any, make_trainer, batch_by_seed) -> None:
    trainer = make_trainer(lora=lora, loss=REFRESHED)
    start, state = reference_of(trainer), trainer.state_dict()
    state = replace(state, tensors=copies(state.tensors))
    for seed in range(2):
        trainer.train_step(batch_by_seed(seed))
    assert any(not torch.equal(each, start[name]) for name, each in reference_of(trainer).items())
    trainer.load_state_dict(state)
    assert_equal(reference_of(trainer), start)


def test_a_refreshed_reference_stays_where_it_is_refreshed_no_more(make_trainer, batch_by_seed, tmp_path) -> None:
    trainers = [make_trainer(loss={**REFRESHED, "reference_refresh_interval": each}) for each in (1, 0, 0)]
    trainers[0].train_step(batch_by_seed(0))
    expected = reference_of(trainers[0])
    for number, (saved, taken) in enumerate(pairwise(trainers)):
        saved.save(tmp_path / str(number))
        taken.load(tmp_path / str(number))
        taken.train_step(batch_by_seed(1))
        assert_equal(reference_of(taken), expected)
    plain = make_trainer(loss={"kl_coefficient": 0.1})
    assert not any(name.startswith("reference/") for name in plain.state_dict().tensors)
    plain.load(tmp_path / "0")
    without = make_trainer()
    without.load(tmp_path / "0")
    assert not any(name.startswith("reference/") for name in without.state_dict().tensors)


def test_a_state_of_another_reference_is_refused_and_changes_nothing(make_trainer, batch_by_seed) -> None:
    trainer = make_trainer(loss=REFRESHED)
    trainer.train_step(batch_by_seed(0))
    state, before = trainer.state_dict(), policy_of(trainer)
    name = "reference/model.layers.0.mlp.up_proj.weight"
    for tensors in (
        {key: each for key, each in state.tensors.items() if key != name},
        {**state.tensors, name: torch.zeros(3, 3)},
    ):
        moved = {key: each + 1.0 if key.startswith("model/") else each for key, each in tensors.items()}
        with pytest.raises(CheckpointError, match=f"of another reference: it has no '{name}' of shape"):
            trainer.load_state_dict(replace(state, tensors=moved))
    assert_equal(policy_of(trainer), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": {"reference_refresh_interval": 5}}, "reference_refresh_interval has no effect without a divergence"),
        ({"loss": {"kl_coefficient": 0.1, "reference_mixup_alpha": 0.5}}, "no effect with reference_refresh_interval"),
        ({"loss": MIXED, "lora": LORA}, "cannot be mixed matrix by matrix: set loss.reference_mixup_alpha = 1"),
        ({"loss": {**REFRESHED, "reference_checkpoint": "x"}, "lora": LORA}, "remove loss.reference_checkpoint, or"),
    ],
)
def test_a_refresh_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainSettings.model_validate(settings)


def test_the_policy_is_not_touched_by_a_refresh(make_trainer, batch_by_seed) -> None:
    plain, refreshed = make_trainer(), make_trainer(loss={**REFRESHED, "kl_coefficient": 1e-12})
    for seed in range(3):
        for each in (plain, refreshed):
            each.train_step(batch_by_seed(seed))
    np.testing.assert_allclose(
        torch.cat([each.flatten() for each in policy_of(plain).values()]),
        torch.cat([each.flatten() for each in policy_of(refreshed).values()]),
        atol=1e-6,
    )
