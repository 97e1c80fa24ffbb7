from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from rollfeed.batch import cut_batch, group_advantages
from rollfeed.config import RolloutSettings
from rollfeed.generate import single_turn
from rollfeed.pipeline import GroupPlan, Observers, RolloutParts, Rollouts, StepSynchronous
from rollfeed.protocols import Engine, PromptSource, RolloutObserver
from rollfeed.testing import CharTokenizer, ListSource
from rollfeed.types import (
    Correct,
    Drop,
    FilterDecision,
    Keep,
    Prompt,
    Rollout,
    RunState,
    Sample,
    SamplingParams,
    StepCommit,
    Verdict,
)


class DigitScorer:
    """Reward is the number that the response is."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
        del prompt
        self.num_calls += 1
        return [Verdict(reward=float(r.samples[-1].response or 0), correct=Correct.YES) for r in rollouts]


def keep_all(samples: Sequence[Sample]) -> FilterDecision:
    del samples
    return Keep()


def drop_equal(samples: Sequence[Sample]) -> FilterDecision:
    rewards = {sample.get_reward_value() for sample in samples}
    return Drop("equal") if len(rewards) == 1 else Keep()


@pytest.fixture
def make_rollouts() -> Callable[..., Rollouts]:
    """Return a factory of managers over a scripted engine; keyword arguments are settings or parts."""

    def make(
        engine: Engine,
        *,
        source: PromptSource | None = None,
        state: RunState | None = None,
        commit: Callable[[StepCommit], None] | None = None,
        observers: Sequence[RolloutObserver] = (),
        seed: int = 0,
        max_response_len: int = 8,
        **overrides: Any,
    ) -> Rollouts:
        part_names = ("generate_fn", "rollout_fn", "scorer", "group_filter", "sample_hook")
        parts = {name: overrides.pop(name) for name in part_names if name in overrides}
        settings = RolloutSettings(**{"rollout_batch_size": 4, "n_samples_per_prompt": 2, **overrides})
        scheduler = StepSynchronous(
            refill=settings.refill,
            deterministic=settings.deterministic,
            surplus=settings.surplus,
            requeue_aborted=settings.requeue_aborted,
            group_failure=settings.group_failure,
            max_draws_per_batch=settings.max_draws_per_batch,
        )
        defaults: dict[str, Any] = {
            "generate_fn": single_turn,
            "rollout_fn": scheduler,
            "scorer": DigitScorer(),
            "group_filter": keep_all,
            "sample_hook": None,
        }
        return Rollouts(
            settings=settings,
            plan=GroupPlan(
                run_seed=seed,
                n_samples_per_prompt=settings.n_samples_per_prompt,
                params=SamplingParams(max_new_tokens=max_response_len),
                max_context_length=10_000,
                rollout_timeout_seconds=settings.rollout_timeout_seconds,
                failure_policy=settings.group_failure,
                failure_retries=settings.failure_retries,
            ),
            parts=RolloutParts(
                default_generate_fn=single_turn,
                cut_batch=partial(cut_batch, reward_key=None, advantage_fn=group_advantages),
                **{**defaults, **parts},
            ),
            source=source or ListSource([f"prompt {number}" for number in range(10)], repeat=True),
            engine=engine,
            tokenizer=CharTokenizer(),
            state=state,
            commit=commit,
            observers=Observers(observers),
        )

    return make
