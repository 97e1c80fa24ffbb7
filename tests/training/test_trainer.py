from __future__ import annotations

import asyncio
import math
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from rollfeed.config.train import Normalisation
from rollfeed.errors import CheckpointError, ConfigError, RunFailedError
from rollfeed.testing.prompts import CharTokenizer
from rollfeed.training.losses import token_weights
from rollfeed.training.trainer import Trainer
from rollfeed.types import SamplingParams, TensorUpdate, TrainBatch, VersionSpan
from rollfeed.weights import write_checkpoint

LEARNING_RATE = 0.05
# With a large epsilon AdamW's updates are nearly proportional to gradients, so that errors of tiny ones stay tiny.
SMOOTH = {"learning_rate": LEARNING_RATE, "epsilon": 1.0, "max_grad_norm": 1e9}


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights().items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], *, tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0.0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def reference_update(
    checkpoint: Path,
    batch: TrainBatch,
    *,
    normalisation: Normalisation,
    weight_decay: float = 0.0,
    max_norm: float = 1e9,
) -> tuple[dict[str, torch.Tensor], float]:
    """One AdamW step from the formulas: float64, one sequence at a time, no packing. The ratio is 1 at the start."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    samples = batch.samples
    masks = np.concatenate([sample.loss_mask for sample in samples])
    ids = np.repeat([sample.rollout_id for sample in samples], [sample.response_length for sample in samples])
    weights = token_weights(masks, ids, normalisation=normalisation, constant_length=16).astype(np.float64)
    total, place = torch.zeros((), dtype=torch.float64), 0
    for sample, advantage in zip(samples, batch.advantages_S, strict=True):
        tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
        if sample.response_length:
            logprobs = torch.log_softmax(model(tokens[None]).logits[0], -1)
            predicted = logprobs[sample.prompt_length - 1 : -1]
            chosen = predicted.gather(1, tokens[sample.prompt_length :, None])[:, 0]
            own = torch.from_numpy(weights[place : place + sample.response_length])
            total = total - (torch.exp(chosen - chosen.detach()) * float(advantage) * own).sum()
        place += sample.response_length
    total.backward()
    parameters = dict(model.named_parameters())
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters.values()))
    scale = min(1.0, max_norm / norm)
    updated = {}
    for name, parameter in parameters.items():
        gradient = parameter.grad * scale
        decayed = parameter.detach() * (1 - LEARNING_RATE * (weight_decay if parameter.ndim >= 2 else 0.0))
        # The bias corrections of a first step leave the gradient and its square.
        updated[name] = (decayed - LEARNING_RATE * gradient / (gradient.abs() + 1.0)).float()
    return updated, total.item()


@pytest.mark.parametrize("normalisation", Normalisation)
def test_an_update_is_that_of_the_formulas(normalisation, make_trainer, tiny_checkpoint, batch_by_seed) -> None:
    batch = batch_by_seed(1)
    trainer = make_trainer(
        optimizer={**SMOOTH, "weight_decay": 0.1}, loss={"normalisation": normalisation}, micro_batch_tokens=32
    )
    report = trainer.train_step(batch)
    expected, loss = reference_update(tiny_checkpoint, batch, normalisation=normalisation, weight_decay=0.1)
    assert_equal(weights_of(trainer), expected, tolerance=2e-6)
    assert report.metrics["train/loss"] == pytest.approx(loss, abs=1e-6)
    assert report.metrics["train/micro_batches"] > 1


def test_gradients_are_scaled_to_the_largest_norm(make_trainer, tiny_checkpoint, batch_by_seed) -> None:
    batch = batch_by_seed(1)
    trainer = make_trainer(optimizer={**SMOOTH, "max_grad_norm": 0.5})
    report = trainer.train_step(batch)
    expected, _ = reference_update(tiny_checkpoint, batch, normalisation=Normalisation.TOKEN, max_norm=0.5)
    assert_equal(weights_of(trainer), expected, tolerance=2e-6)
    assert report.metrics["train/grad_norm"] > 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_tokens": 17},
        {"micro_batch_tokens": 64, "share_prompts": False},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "share_prompts": False, "micro_batch_tokens": 24},
    ],
)
@pytest.mark.parametrize("loss", [{}, {"ratio": "sequence", "normalisation": "sequence", "kl_coefficient": 0.1}])
def test_how_a_batch_is_cut_and_computed_does_not_change_the_update(
    settings: dict[str, Any], loss: dict[str, Any], make_trainer, batch_by_seed
) -> None:
    batch = batch_by_seed(2)
    plain, other = make_trainer(optimizer=SMOOTH, loss=loss), make_trainer(optimizer=SMOOTH, loss=loss, **settings)
    assert plain.shares_prompts
    for _ in range(2):
        first, second = plain.train_step(batch), other.train_step(batch)
    assert_equal(weights_of(plain), weights_of(other), tolerance=2e-6)
    assert first.metrics["train/loss"] == pytest.approx(second.metrics["train/loss"], abs=1e-5)
    assert first.metrics["train/entropy"] == pytest.approx(second.metrics["train/entropy"], abs=1e-5)
    assert first.metrics["train/tokens"] == second.metrics["train/tokens"]


@pytest.mark.parametrize("normalisation", Normalisation)
def test_r22_a_masked_sample_changes_nothing(normalisation, make_trainer, sample_of, group_of, batch_of) -> None:
    """R22: two samples, one fully masked: the loss and the update equal those of the other alone."""
    trained = sample_of([1, 2], [3, 4, 5], index=0, rollout_id=0)
    masked = sample_of([1, 2], [9, 9, 9, 9, 9], index=1, rollout_id=1, mask=[0] * 5)
    alone, both, removed = [make_trainer(loss={"normalisation": normalisation}) for _ in range(3)]
    reports = [
        alone.train_step(batch_of([group_of(0, [[trained]])], [1.0])),
        both.train_step(batch_of([group_of(0, [[trained], [masked]])], [1.0, -2.0])),
        removed.train_step(
            batch_of(
                [group_of(0, [[trained], [replace(masked, loss_mask=np.ones(5, np.float32), remove_sample=True)]])],
                [1.0, -2.0],
            )
        ),
    ]
    assert len({report.metrics["train/loss"] for report in reports}) == 1
    assert_equal(weights_of(alone), weights_of(both))
    assert_equal(weights_of(alone), weights_of(removed))


def test_r22_tokens_of_advantage_zero_count_in_the_normalisation(make_trainer, sample_of, group_of, batch_of) -> None:
    """R22: the normaliser is all trained tokens, not those with a gradient."""
    members = [[sample_of([1], [2, 3], rollout_id=0)], [sample_of([1], [4, 5], rollout_id=1)]]
    report = make_trainer().train_step(batch_of([group_of(0, members)], [1.0, 0.0]))
    assert report.metrics["train/loss"] == pytest.approx(-0.5)


@pytest.mark.parametrize("settings", [{}, {"num_epochs": 2, "num_minibatches": 2, "micro_batch_tokens": 24}])
def test_metrics_are_over_all_trained_tokens_those_without_a_gradient_too(
    settings: dict[str, Any], make_trainer, batch_by_seed
) -> None:
    batch = batch_by_seed(8)
    advantages = batch.advantages_S.copy()
    advantages[:4] = 0.0  # a group of equal rewards
    batch = replace(batch, advantages_S=advantages)
    report = make_trainer(optimizer=SMOOTH, **settings).train_step(batch)
    # A penalty brings a gradient everywhere, and this one is too small to change anything.
    everywhere = make_trainer(optimizer=SMOOTH, loss={"kl_coefficient": 1e-12}, **settings).train_step(batch)
    trained = sum(np.count_nonzero(sample.loss_mask) for sample in batch.samples) * settings.get("num_epochs", 1)
    zero = sum(np.count_nonzero(sample.loss_mask) for sample in batch.samples[:4]) * settings.get("num_epochs", 1)
    assert report.metrics["train/tokens"] == trained
    assert report.metrics["train/tokens"] * report.metrics["train/zero_advantage_tokens"] == trained * zero > 0
    assert "train/zero_advantage_tokens" not in everywhere.metrics
    passes = {"train/computed_tokens", "train/padded_tokens", "train/micro_batches"}
    for name in report.metrics.keys() & everywhere.metrics.keys() - passes:
        assert report.metrics[name] == pytest.approx(everywhere.metrics[name], rel=1e-4, abs=1e-5), name
    assert report.metrics["train/computed_tokens"] < everywhere.metrics["train/computed_tokens"]


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: values that are read, and shapes that depend on values.

    Left out is what transformers does of itself: it looks whether rows without branches are packed, once a pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
            for group in args
            if isinstance(group, list | tuple)
            for each in group
        )
        dynamic = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
        if by_mask or (dynamic and not name.startswith("index")):
            is_theirs = any(frame.name == "find_packed_sequence_indices" for frame in traceback.extract_stack())
            self.found[name] += not is_theirs
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "loss",
    [
        {"correction": "truncate"},
        {"ratio": "sequence", "normalisation": "sequence", "correction": "mask", "kl_coefficient": 0.1},
    ],
)
@pytest.mark.parametrize("settings", [{}, {"num_epochs": 2}])
def test_within_a_micro_batch_the_host_never_waits_for_the_device(
    loss: dict[str, Any], settings: dict[str, Any], make_trainer, batch_by_seed
) -> None:
    """Waits are counted in a step of one micro-batch and in one of many: they are of updates, not of micro-batches."""
    batch = batch_by_seed(9)
    batch = replace(batch, advantages_S=np.where(np.arange(len(batch.samples)) < 4, 0.0, batch.advantages_S))
    found = []
    for micro_batch_tokens in (4096, 16):
        trainer = make_trainer(loss=loss, micro_batch_tokens=micro_batch_tokens, **settings)
        with Waits() as waits:
            report = trainer.train_step(batch)
        found.append((report.metrics["train/micro_batches"], waits.found))
    (few, once), (many, often) = found
    assert few < 3 < many
    assert once == often
    assert sum(once.values()) <= 4 * report.num_updates


def test_r20_batches_with_empty_responses_are_trained_on_or_left_out(
    make_trainer, sample_of, group_of, batch_of
) -> None:
    """R20: an empty response is legal and not trained on, and only empty ones give no update."""
    trainer = make_trainer()
    before = weights_of(trainer)
    report = trainer.train_step(batch_of([group_of(0, [[sample_of([1], [])], [sample_of([1], [])]])], [1.0, -1.0]))
    assert (report.num_updates, len(report.skipped)) == (0, 1)
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert_equal(before, weights_of(trainer))
    mixed = batch_of([group_of(0, [[sample_of([1], [])], [sample_of([1], [2])]])], [1.0, -1.0])
    assert trainer.train_step(mixed).num_updates == 1
    assert trainer.step == 2


def test_equal_advantages_of_zero_change_nothing(make_trainer, batch_by_seed) -> None:
    trainer = make_trainer()
    before = weights_of(trainer)
    batch = batch_by_seed(0)
    report = trainer.train_step(replace(batch, advantages_S=np.zeros_like(batch.advantages_S)))
    assert report.num_updates == 0
    assert_equal(before, weights_of(trainer))


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_trainer_and_embedded_engine_agree(
    temperature: float, share_prompts: bool, tiny_checkpoint: Path, make_trainer, sample_of, group_of, batch_of
) -> None:
    from rollfeed.config.train import TrainSettings
    from rollfeed.engine.local import create_local_engine

    trainer = Trainer(
        tiny_checkpoint,
        settings=TrainSettings(device="cpu", share_prompts=share_prompts, optimizer={"learning_rate": 1e-2}),
        temperature=temperature,
        num_batches=4,
        max_response_length=24,
    )
    engine = create_local_engine(
        checkpoint=tiny_checkpoint,
        tokenizer=CharTokenizer(),
        threads=1,
        num_slots=8,
        context_length=128,
        deterministic=False,
        device="cpu",
    )
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (3, 11)]

    async def sample(version: int) -> list[Any]:
        params = [SamplingParams(max_new_tokens=24, temperature=temperature, seed=100 * version + n) for n in range(8)]
        completions = await asyncio.gather(
            *(engine.generate(prompts[n % 2], params[n], request_id=str(n)) for n in range(8))
        )
        return [
            replace(
                sample_of(prompts[n % 2].tolist(), c.token_ids.tolist(), logprobs=c.logprobs, index=n, rollout_id=n),
                group_index=n % 2,
                version_spans=(VersionSpan(0, len(c.token_ids), version),),
            )
            for n, c in enumerate(completions)
        ]

    async def main() -> None:
        async with engine:
            for version in range(3):
                samples = await sample(version)
                for mine, own in zip(trainer.logprobs(samples), samples, strict=True):
                    np.testing.assert_allclose(mine, own.logprobs, atol=1e-4)
                groups = [group_of(g, [[s] for s in samples if s.group_index == g]) for g in range(2)]
                report = trainer.train_step(batch_of(groups, [1.0, -1.0] * 4))
                assert report.metrics["train/mismatch_abs_max"] < 1e-4
                assert 0.999 < report.metrics["train/mismatch_ratio_min"] <= report.metrics["train/mismatch_ratio_max"]
                assert report.metrics["train/mismatch_ratio_max"] < 1.001
                await engine.apply(TensorUpdate(trainer.weights(), policy_version=version + 1))

    asyncio.run(main())


def test_restricted_sampling_has_ratios_of_1_with_sampling_masks_only(
    tiny_checkpoint: Path, make_trainer, sample_of, group_of, batch_of
) -> None:
    """Same weights in engine and trainer; GSPO's clipping range is exceeded by all responses without the masks."""
    from rollfeed.engine.local import create_local_engine

    engine = create_local_engine(
        checkpoint=tiny_checkpoint, tokenizer=CharTokenizer(), threads=1, num_slots=8, context_length=128,
        deterministic=False, device="cpu",
    )  # fmt: skip
    prompt = np.arange(3, 14, dtype=np.int32)
    params = SamplingParams(max_new_tokens=24, top_p=0.95, top_k=250, min_new_tokens=3, return_sampling_mask=True)

    async def main() -> list[Any]:
        async with engine:
            asked = (engine.generate(prompt, replace(params, seed=n), request_id=str(n)) for n in range(8))
            return await asyncio.gather(*asked)

    samples = [
        sample_of(
            prompt.tolist(), c.token_ids.tolist(), logprobs=c.logprobs, index=n, rollout_id=n,
            sampling_mask=c.sampling_mask,
        )
        for n, c in enumerate(asyncio.run(main()))
    ]  # fmt: skip
    gspo = {"ratio": "sequence", "normalisation": "sequence", "clip_low": 0.0003, "clip_high": 0.0004}
    found = []
    for given in (samples, [replace(sample, sampling_mask=None) for sample in samples]):
        trainer = make_trainer(loss={"old_logprobs": "rollout", **gspo}, micro_batch_tokens=128)
        metrics = trainer.train_step(batch_of([group_of(0, [[each] for each in given])], [1.0, -1.0] * 4)).metrics
        found.append(metrics)
    with_masks, without = found
    assert with_masks["train/mismatch_abs_max"] < 1e-5
    assert with_masks["train/policy_ratio_min"] == pytest.approx(1.0, abs=1e-6)
    assert with_masks["train/policy_ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert with_masks["train/clipped_low_ratio"] == with_masks["train/clipped_high_ratio"] == 0
    assert without["train/policy_ratio_max"] < 1 - 0.0003
    assert without["train/clipped_low_ratio"] > 0.4


def test_several_updates_a_batch_move_away_from_the_policy_before_the_first(make_trainer, batch_by_seed) -> None:
    trainer = make_trainer(num_epochs=3, num_minibatches=2, optimizer={"learning_rate": 0.02})
    first = make_trainer().train_step(batch_by_seed(3)).metrics
    report = trainer.train_step(batch_by_seed(3))
    assert report.num_updates == 6
    assert (first["train/policy_ratio_min"], first["train/policy_ratio_max"]) == (1.0, 1.0)
    assert report.metrics["train/policy_ratio_min"] < 0.8
    assert report.metrics["train/clipped_low_ratio"] > 0
    assert report.metrics["train/clipped_high_ratio"] > 0
    # The mismatch is that of the policy before the first update, in every one of them.
    assert report.metrics["train/mismatch_k1"] == pytest.approx(first["train/mismatch_k1"], abs=1e-4)


def test_training_makes_what_was_rewarded_likelier(make_trainer, batch_by_seed) -> None:
    trainer, batch = make_trainer(), batch_by_seed(4)
    before = [values.sum() for values in trainer.logprobs(batch.samples)]
    for _ in range(3):
        trainer.train_step(batch)
    gained = np.array([values.sum() for values in trainer.logprobs(batch.samples)]) - before
    assert np.corrcoef(gained, batch.advantages_S)[0, 1] > 0.5


def test_the_reference_is_the_model_as_training_found_it(make_trainer, batch_by_seed) -> None:
    trainer, batch = make_trainer(loss={"kl_coefficient": 0.5}), batch_by_seed(5)
    first, second = trainer.train_step(batch), trainer.train_step(batch)
    assert first.metrics["train/reference_kl"] == pytest.approx(0.0, abs=1e-9)
    assert second.metrics["train/reference_kl"] > 0.001
    free = make_trainer()
    free.train_step(batch)
    strong = make_trainer(loss={"kl_coefficient": 100.0})
    for each in (free, strong):
        for _ in range(4):
            each.train_step(batch)
    started = make_trainer().logprobs(batch.samples)
    moved = [
        np.mean([np.abs(a - b).sum() for a, b in zip(each.logprobs(batch.samples), started, strict=True)])
        for each in (free, strong)
    ]
    assert moved[1] < moved[0]


def test_a_reference_of_its_own_stays_what_it_is(make_trainer, batch_by_seed, tiny_checkpoint, tmp_path) -> None:
    other, batch = make_trainer(), batch_by_seed(5)
    other.train_step(batch)
    write_checkpoint(other.weights(), tmp_path / "reference", checkpoint=tiny_checkpoint)
    trainer = make_trainer(reference=tmp_path / "reference", loss={"kl_coefficient": 1e-9, "kl_estimator": "k3"})
    trainer.take_as_reference()
    assert trainer.train_step(batch).metrics["train/reference_kl"] > 0.001
    # The same update as the reference had; what penalises the divergence is nothing beside it.
    assert trainer.train_step(batch).metrics["train/reference_kl"] == pytest.approx(0.0, abs=1e-6)


def test_truncation_weights_tokens_by_the_ratio_to_the_engine(make_trainer, sample_of, group_of, batch_of) -> None:
    sample = sample_of([1, 2], [3, 4, 5])
    [true] = make_trainer().logprobs([sample])
    ratios = np.array([0.1, 1.5, 9.0])
    off = replace(sample, logprobs=(true - np.log(ratios)).astype(np.float32))
    batch = batch_of([group_of(0, [[off]])], [1.0])
    for correction, expected in (("truncate", [0.1, 1.5, 2.0]), ("mask", [0.0, 1.5, 0.0]), ("none", [1.0, 1.0, 1.0])):
        report = make_trainer(loss={"correction": correction}).train_step(batch)
        assert report.metrics["train/loss"] == pytest.approx(-np.mean(expected), rel=1e-4)
        assert report.metrics["train/mismatch_ratio_max"] == pytest.approx(9.0, rel=1e-3)
        assert ("train/corrected_ratio" in report.metrics) is (correction != "none")


def test_every_number_of_an_update(make_trainer, sample_of, group_of, batch_of) -> None:
    sample = sample_of([1, 2], [3, 4, 5, 6], mask=[1.0, 1.0, 1.0, 0.0])
    [true] = make_trainer().logprobs([sample])
    ratios = np.array([0.1, 1.5, 9.0])
    off = replace(sample, logprobs=(true - np.log([*ratios, 1.0])).astype(np.float32))
    trainer = make_trainer(loss={"correction": "truncate", "kl_coefficient": 0.5})
    metrics = trainer.train_step(batch_of([group_of(0, [[off]])], [1.0])).metrics
    entropy = metrics.pop("train/entropy")
    assert 0 < entropy < np.log(259)
    assert metrics.pop("train/grad_norm") > 0
    expected = {
        "train/tokens": 3,
        "train/loss": -np.mean([0.1, 1.5, 2.0]),
        "train/mismatch_k1": -np.log(ratios).mean(),
        "train/mismatch_kl": (ratios - 1 - np.log(ratios)).mean(),
        "train/mismatch_abs": np.abs(np.log(ratios)).mean(),
        "train/mismatch_abs_min": np.log(1.5),
        "train/mismatch_abs_max": np.log(10),
        "train/mismatch_ratio_min": 0.1,
        "train/mismatch_ratio_max": 9.0,
        "train/policy_ratio_min": 1.0,
        "train/policy_ratio_max": 1.0,
        "train/clipped_low_ratio": 0.0,
        "train/clipped_high_ratio": 0.0,
        "train/correction_weight": np.mean([0.1, 1.5, 2.0]),
        "train/corrected_ratio": 1 / 3,
        "train/reference_kl": 0.0,
        "train/learning_rate": 0.01,
        "train/updates": 1,
        "train/skipped_updates": 0,
        "train/computed_tokens": 4,
        "train/padded_tokens": 4,
        "train/micro_batches": 1,
    }
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_ratios_to_the_rollout_policy_are_clipped_from_the_first_update_on(
    make_trainer, sample_of, group_of, batch_of
) -> None:
    sample = sample_of([1, 2], [3, 4])
    [true] = make_trainer().logprobs([sample])
    off = replace(sample, logprobs=(true - np.log([1.1, 3.0])).astype(np.float32))
    batch = batch_of([group_of(0, [[off]])], [1.0])
    report = make_trainer(loss={"old_logprobs": "rollout"}).train_step(batch)
    assert report.metrics["train/loss"] == pytest.approx(-(1.1 + 1.2) / 2, rel=1e-4)
    assert report.metrics["train/clipped_high_ratio"] == 0.5


@pytest.mark.parametrize("advantage", [math.inf, 1e38])
def test_a_loss_or_gradient_that_is_not_finite_stops_and_changes_nothing(
    advantage: float, make_trainer, sample_of, group_of, batch_of
) -> None:
    batch = batch_of([group_of(0, [[sample_of([1, 2], [3, 4], index=11)]])], [advantage], step=6)
    trainer = make_trainer()
    before = weights_of(trainer)
    what = r"the loss \(-inf\) of the micro-batch with samples 11" if advantage == math.inf else "the gradient of "
    with pytest.raises(RunFailedError, match=rf"step 6, update 0: {what}.* is not finite"):
        trainer.train_step(batch)
    assert_equal(before, weights_of(trainer))


@pytest.mark.parametrize(("broken_group", "is_mid_batch"), [(0, False), (1, True)])
def test_a_trainer_knows_whether_it_failed_between_two_updates_of_a_batch(
    broken_group: int, is_mid_batch: bool, make_trainer, sample_of, group_of, batch_of
) -> None:
    groups = [group_of(number, [[sample_of([1, 2], [3, 4])]]) for number in range(2)]
    trainer = make_trainer(num_minibatches=2)
    said = "1 update of this batch had been made before, which no checkpoint holds" if is_mid_batch else "nothing was"
    with pytest.raises(RunFailedError, match=f"is not finite; {said}"):
        trainer.train_step(batch_of(groups, [math.inf if number == broken_group else 1.0 for number in range(2)]))
    assert trainer.is_mid_batch is is_mid_batch
    trainer.train_step(batch_of(groups, [1.0, 1.0]))
    assert not trainer.is_mid_batch


def test_by_policy_an_update_that_is_not_finite_is_left_out(make_trainer, batch_by_seed, caplog) -> None:
    batch = batch_by_seed(6)
    broken = batch.advantages_S.copy()
    broken[-1] = np.nan
    trainer, other = make_trainer(on_non_finite="skip"), make_trainer(on_non_finite="skip")
    before = weights_of(trainer)
    report = trainer.train_step(replace(batch, advantages_S=broken))
    assert report.num_updates == 0
    assert "not finite" in report.skipped[0]
    assert "not finite" in caplog.text
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert_equal(before, weights_of(trainer))
    trainer.train_step(batch)
    other.train_step(batch)
    assert_equal(weights_of(other), weights_of(trainer))


def test_tokens_outside_the_vocabulary_are_named(make_trainer, sample_of, group_of, batch_of) -> None:
    trainer = make_trainer()
    before = weights_of(trainer)
    with pytest.raises(ConfigError, match="token id 259 is outside the model's vocabulary of 259: the tokenizer"):
        trainer.train_step(batch_of([group_of(0, [[sample_of([1, 2], [259])]])], [1.0]))
    assert_equal(before, weights_of(trainer))


def test_samples_that_do_not_fit_are_named_before_anything_changes(make_trainer, sample_of, group_of, batch_of) -> None:
    batch = batch_of([group_of(0, [[sample_of([1] * 3, [2] * 30, index=4)]])], [1.0])
    with pytest.raises(ConfigError, match=r"train\.micro_batch_tokens = 16: sample 4 has 32 tokens"):
        make_trainer(micro_batch_tokens=16).train_step(batch)
    longer = batch_of([group_of(0, [[sample_of([1] * 3, [2] * 1030, index=4)]])], [1.0])
    with pytest.raises(ConfigError, match="sample 4 has 1032 tokens, and the model that is trained takes at most 1024"):
        make_trainer().train_step(longer)


def test_a_device_that_is_not_there_is_named(make_trainer) -> None:
    for device in ("cuda:99", "quantum"):
        with pytest.raises(ConfigError, match=rf"train\.device = '{device}': not usable here"):
            make_trainer(device=device)


SCHEDULED = {
    "optimizer": {"learning_rate": 0.01, "schedule": "cosine", "warmup_updates": 3, "weight_decay": 0.01},
    "num_epochs": 2,
    "num_minibatches": 2,
    "micro_batch_tokens": 32,
    "loss": {"kl_coefficient": 0.05, "correction": "truncate"},
}


@pytest.mark.parametrize("stop", range(1, 4))
def test_a_trainer_stopped_after_any_step_goes_on_bit_by_bit(
    stop: int, make_trainer, batch_by_seed, tmp_path: Path
) -> None:
    batches = [batch_by_seed(seed) for seed in range(4)]
    unbroken = make_trainer(**SCHEDULED, num_batches=4)
    expected = [unbroken.train_step(batch).metrics for batch in batches]
    first = make_trainer(**SCHEDULED, num_batches=4)
    got = [first.train_step(batch).metrics for batch in batches[:stop]]
    first.save(tmp_path / "state")
    first.train_step(batches[0])  # what happens afterwards is not in the files
    second = make_trainer(**SCHEDULED, num_batches=4)
    second.load(tmp_path / "state")
    assert second.step == stop
    got += [second.train_step(batch).metrics for batch in batches[stop:]]
    assert got == expected
    assert_equal(weights_of(second), weights_of(unbroken))
    ends = [trainer.state_dict() for trainer in (second, unbroken)]
    assert ends[0].values == ends[1].values
    assert_equal(dict(ends[0].tensors), dict(ends[1].tensors))


def test_a_state_goes_through_memory_as_well(make_trainer, batch_by_seed) -> None:
    trainer, other = make_trainer(), make_trainer()
    other.load_state_dict(trainer.state_dict())
    for each in (trainer, other):
        each.train_step(batch_by_seed(0))
    third = make_trainer()
    third.load_state_dict(other.state_dict())
    for each in (trainer, third):
        each.train_step(batch_by_seed(1))
    assert_equal(weights_of(trainer), weights_of(third))


def test_a_state_is_taken_under_other_settings(make_trainer, batch_by_seed) -> None:
    trained = make_trainer()
    trained.train_step(batch_by_seed(0))
    changes = {"micro_batch_tokens": 99, "share_prompts": False, "checkpoint_interval": 3, "eval_interval": 2}
    other = make_trainer(**changes, optimizer={"learning_rate": 0.5, "beta2": 0.95, "max_grad_norm": 0.3})
    other.load_state_dict(trained.state_dict())
    assert_equal(weights_of(other), weights_of(trained))
    assert other.train_step(batch_by_seed(1)).metrics["train/learning_rate"] == 0.5
    assert other._optimizer._adamw.param_groups[0]["betas"] == (0.9, 0.95)


def test_a_state_of_another_model_is_refused_and_changes_nothing(make_trainer, batch_by_seed) -> None:
    trainer = make_trainer()
    trainer.train_step(batch_by_seed(0))
    state = trainer.state_dict()
    before = weights_of(trainer)
    name = "model/model.layers.0.mlp.up_proj.weight"
    for tensors, message in (
        ({k: v for k, v in state.tensors.items() if k != name}, "of another model: it has no weight"),
        ({**state.tensors, name: torch.zeros(3, 3)}, "of another model: it has no weight"),
        ({k: v for k, v in state.tensors.items() if k != name.replace("model/", "exp_avg/", 1)}, "has no exp_avg"),
    ):
        with pytest.raises(CheckpointError, match=message):
            trainer.load_state_dict(replace(state, tensors=tensors))
    assert_equal(before, weights_of(trainer))


def test_weights_have_the_names_of_the_checkpoint_and_tied_ones_once(make_trainer, tiny_checkpoint: Path) -> None:
    from safetensors.torch import load_file

    weights = make_trainer().weights()
    assert_equal(weights, load_file(tiny_checkpoint / "model.safetensors"))
    assert "lm_head.weight" not in weights


@pytest.mark.parametrize("share_prompts", [False, True])
def test_bf16_passes_come_near_fp32_ones_and_weights_stay_fp32(
    share_prompts: bool, make_trainer, batch_by_seed
) -> None:
    batch = batch_by_seed(7)
    exact = make_trainer(precision="fp32")
    rough = make_trainer(precision="bf16", share_prompts=share_prompts, loss={"kl_coefficient": 0.1})
    for a, b in zip(exact.logprobs(batch.samples), rough.logprobs(batch.samples), strict=True):
        np.testing.assert_allclose(a, b, atol=0.2)
    assert rough.train_step(batch).num_updates == 1
    assert {tensor.dtype for tensor in rough.weights().values()} == {torch.float32}


def test_the_number_of_threads_is_the_settings_own(make_trainer, batch_by_seed) -> None:
    """Others in the process set it too, and a run that is resumed must add up in the same order."""
    before = torch.get_num_threads()
    trainer, seen = make_trainer(threads=before + 1), []
    trainer.policy.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    trainer.train_step(batch_by_seed(0))
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before
