"""Sets and groups without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rollfeed.config import EvalKeys, SamplingSettings
from rollfeed.evaluation import EvalSet, TrainingDefaults, plan_set
from rollfeed.testing import make_group, make_prompt
from rollfeed.types import Group


@pytest.fixture
def training() -> TrainingDefaults:
    return TrainingDefaults(
        sampling=SamplingSettings(rollout_temperature=0.8, rollout_max_response_len=32, rollout_stop=("END",)),
        n_samples_per_prompt=4,
        rm_type="math",
        reward_key="score",
        context_length=100,
    )


@pytest.fixture
def make_set(training: TrainingDefaults) -> Callable[..., EvalSet]:
    """Return a factory of sets; keyword arguments are keys of the set."""

    def make(name: str = "numbers", *, num_prompts: int = 2, **keys: Any) -> EvalSet:
        prompts = tuple(replace(make_prompt(f"{index} ="), prompt_id=f"{name}/{index}") for index in range(num_prompts))
        plan = plan_set(name, EvalKeys(reward_key=None, **keys), EvalKeys(), replace(training, reward_key=None))
        return EvalSet(name=name, prompts=prompts, plan=plan)

    return make


@pytest.fixture
def result_of() -> Callable[..., Group]:
    """Return a factory of answered groups: one with these rewards, or a failed one with a cause."""

    def make(rewards: Sequence[Any], *, index: int = 0, cause: str = "", group: Group | None = None) -> Group:
        group = group or make_group(rewards, group_index=index)
        if not cause:
            return group
        first, *others = group.rollouts
        return replace(group, rollouts=(replace(first, error=cause, verdict=None), *others))

    return make
