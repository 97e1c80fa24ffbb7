"""Batches of given rewards, lengths and masks; trainers of the tiny model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollfeed import testing
from rollfeed.config.train import TrainSettings
from rollfeed.protocols import LossFn
from rollfeed.training.reference import LessKL
from rollfeed.training.trainer import Trainer
from rollfeed.types import Group, Prompt, Rollout, Sample, TrainBatch

VOCAB = 259


@pytest.fixture(scope="session", autouse=True)
def _modest() -> None:
    # Two busy threads wait for each other more than they compute when the machine has other work.
    torch.set_num_threads(1)


def make_sample(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    *,
    group_index: int = 0,
    index: int = 0,
    rollout_id: int = 0,
    reward: float = 0.0,
    mask: Sequence[float] | None = None,
    logprobs: Sequence[float] | None = None,
    **changes: Any,
) -> Sample:
    if mask is not None:
        changes["loss_mask"] = np.array(mask, np.float32)
    length = len(response_ids)
    return testing.sample_of(
        prompt_ids,
        response_ids,
        logprobs=np.full(length, -3.0, np.float32) if logprobs is None else np.array(logprobs, np.float32),
        group_index=group_index,
        index=index,
        rollout_id=rollout_id,
        reward=reward,
        **changes,
    )


def make_group(group_index: int, members: Sequence[Sequence[Sample]]) -> Group:
    """Return a group of rollouts, each the samples that it forked into."""
    first = next(sample for samples in members for sample in samples)
    prompt_ids = first.token_ids[: first.prompt_length]
    prompt = Prompt(prompt_id=str(group_index), source="made", text="", token_ids=prompt_ids)
    rollouts = tuple(Rollout(rollout_id=samples[0].rollout_id, samples=tuple(samples)) for samples in members)
    return Group(group_index=group_index, prompt=prompt, rollouts=rollouts)


def make_batch(groups: Sequence[Group], advantages: Sequence[float], *, step: int = 0) -> TrainBatch:
    return TrainBatch(
        step=step, policy_version=step, groups=tuple(groups), advantages_S=np.array(advantages, np.float32), metrics={}
    )


def random_batch(seed: int, *, num_groups: int = 3, size: int = 4, longest: int = 9) -> TrainBatch:
    """Return groups of shared prompts, with masks, an empty response and rewards that differ."""
    rng = np.random.default_rng(seed)
    groups, advantages = [], []
    for group_index in range(num_groups):
        prompt = rng.integers(0, VOCAB, rng.integers(2, 7)).tolist()
        members = []
        for member in range(size):
            length = 0 if member == 1 and group_index == 0 else int(rng.integers(1, longest + 1))
            number = group_index * size + member
            sample = make_sample(
                prompt,
                rng.integers(0, VOCAB, length).tolist(),
                group_index=group_index,
                index=number,
                rollout_id=number,
                reward=float(member % 2),
                mask=(rng.random(length) < 0.8).astype(np.float32),
                logprobs=-rng.random(length) * 5,
            )
            members.append([sample])
            advantages.append(float(rng.normal()))
        groups.append(make_group(group_index, members))
    return make_batch(groups, advantages, step=seed)


@pytest.fixture(scope="session")
def sample_of() -> Callable[..., Sample]:
    return make_sample


@pytest.fixture(scope="session")
def group_of() -> Callable[..., Group]:
    return make_group


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., TrainBatch]:
    return make_batch


@pytest.fixture(scope="session")
def batch_by_seed() -> Callable[..., TrainBatch]:
    return random_batch


@pytest.fixture
def make_trainer(tiny_checkpoint: Path) -> Callable[..., Trainer]:
    def make(
        *,
        checkpoint: Path = tiny_checkpoint,
        reference: Path | None = None,
        num_batches: int = 10,
        loss_function: LossFn | None = None,
        advantages_less_kl: LessKL | None = None,
        **settings: Any,
    ) -> Trainer:
        values = {"device": "cpu", "threads": 1, "optimizer": {"learning_rate": 1e-2}, **settings}
        if loss_function is not None:
            values["loss"] = {**values.get("loss", {}), "function": loss_function}
        return Trainer(
            checkpoint,
            reference=reference,
            settings=TrainSettings(**values),
            temperature=1.0,
            num_batches=num_batches,
            max_response_length=16,
            loss_function=loss_function,
            advantages_less_kl=advantages_less_kl,
        )

    return make
