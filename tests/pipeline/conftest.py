from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from rollfeed.batch import AgeLimit, cut_batch
from rollfeed.buffer import Buffer, fifo
from rollfeed.config import AdvantageSettings, RolloutMode, RolloutSettings, StalenessPolicy
from rollfeed.generate import default_generate
from rollfeed.pipeline import GroupPlan, Observers, RolloutParts, Rollouts, Scheduler
from rollfeed.protocols import Engine, PromptSource, RolloutObserver, Scorer, Services
from rollfeed.testing import CharTokenizer, ListSource, TickEngine
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
from rollfeed.weights import Publisher


class DigitScorer(Scorer):
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
        part_names = (
            "generate_fn",
            "rollout_fn",
            "scorer",
            "group_filter",
            "sample_hook",
            "teacher",
            "placement",
            "weights",
            "publisher",
            "buffer",
        )
        parts = {name: overrides.pop(name) for name in part_names if name in overrides}
        settings = RolloutSettings(**{"rollout_batch_size": 4, "n_samples_per_prompt": 2, **overrides})
        age_rule = AgeLimit(max_staleness=settings.max_staleness, policy=settings.staleness_policy)
        scheduler = Scheduler(settings=settings, age_rule=age_rule)
        defaults: dict[str, Any] = {
            "rollout_fn": scheduler,
            "group_filter": keep_all,
            "surplus_rule": AgeLimit(max_staleness=0, policy=StalenessPolicy.MASK)
            if settings.mask_offpolicy_in_partial_rollout and settings.mode is not RolloutMode.ASYNC
            else age_rule,
            "buffer": Buffer(fifo, n_samples_per_prompt=settings.n_samples_per_prompt, max_bytes=1 << 30),
        }
        return Rollouts(
            plan=GroupPlan(
                settings=settings,
                seed=seed,
                params=SamplingParams(max_new_tokens=max_response_len),
                max_context_length=10_000,
                generate_fn=parts.pop("generate_fn", default_generate),
                services=Services(endpoint=engine, tokenizer=CharTokenizer(), default=default_generate),
                scorer=parts.pop("scorer", None) or DigitScorer(),
                sample_hook=parts.pop("sample_hook", None),
                teacher=parts.pop("teacher", None),
            ),
            parts=RolloutParts(
                publisher=parts.pop("publisher", None) or Publisher(engine, is_proving=False),
                cut_batch=partial(cut_batch, age_rule=age_rule, reward_key=None, estimator=AdvantageSettings()),
                **{**defaults, **parts},
            ),
            source=source or ListSource([f"prompt {number}" for number in range(10)], repeat=True),
            engine=engine,
            state=state,
            commit=commit,
            observers=Observers(observers),
        )

    return make


@pytest.fixture
def tick_engine() -> type[TickEngine]:
    return TickEngine
