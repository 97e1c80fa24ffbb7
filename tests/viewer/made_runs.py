"""Runs that a page is on, written as runs write them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollfeed.testing import sample_of
from rollfeed.types import (
    Correct,
    Dropped,
    Group,
    LedgerCounts,
    Prompt,
    Rollout,
    RunState,
    SampleStatus,
    StepCommit,
    TrainBatch,
    Verdict,
    VersionSpan,
)

NASTY = "</script><img src=x onerror=\"document.title='broken'\"><!--<script>"


def made_group(
    index: int, rewards: list[float], *, num_tokens: int = 5, label: object = None, says_correct: bool = True
) -> Group:
    """A group whose members have a turn of the policy, a token that was given, and another turn."""
    question = f"What is {index} + 1? {NASTY}"
    prompt = Prompt(
        prompt_id=f"sums/{index}",
        source="sums",
        text=f"<user>{question}",
        token_ids=np.arange(65, 69, dtype=np.int32),
        messages=({"role": "system", "content": "Count."}, {"role": "user", "content": question}),
        label=str(index + 1) if label is None else label,
    )
    rollouts = []
    for number, reward in enumerate(rewards):
        ids = np.arange(num_tokens) % 50 + 60
        sample = sample_of(
            prompt.token_ids,
            ids,
            loss_mask=np.array([0.0 if place == 2 else 1.0 for place in range(num_tokens)], np.float32),
            logprobs=np.linspace(-2, -0.25, num_tokens, dtype=np.float32),
            version_spans=(VersionSpan(0, 2, 3), VersionSpan(2, num_tokens, 4)),
            status=SampleStatus.TRUNCATED if number == 1 else SampleStatus.COMPLETED,
            group_index=index,
            index=10 * index + number,
            rollout_id=10 * index + number,
            response=f"It is {index + number}. {NASTY}",
        )
        told = Correct.UNDEFINED if not says_correct else Correct.YES if reward else Correct.NO
        verdict = Verdict(reward=reward, correct=told, extracted=NASTY, detail="seen")
        rollouts.append(Rollout(rollout_id=10 * index + number, samples=(sample,)).with_reward(verdict))
    return Group(group_index=index, prompt=prompt, rollouts=tuple(rollouts))


def commit_of(step: int, *, num_groups: int = 2, **of_group: Any) -> StepCommit:
    first = step * (num_groups + 1)
    groups = tuple(made_group(first + place, [1.0, 0.25 * place, 0.0], **of_group) for place in range(num_groups))
    lost = Dropped(group=made_group(first + num_groups, [0.0, 0.0]), reason="zero_std_0.0")
    return StepCommit(
        batch=TrainBatch(
            step=step,
            policy_version=step,
            groups=groups,
            advantages_S=np.array([0.5, -0.25, -0.25] * num_groups, np.float32),
            metrics={
                "rollout/reward_mean": 0.4 + step / 10,
                "rollout/empty": float("nan"),
                "rollout/staleness_mean": 0.5,
            },
        ),
        dropped=(lost,),
        wasted_tokens={"dropped": 10},
        state=RunState(
            next_step=step + 1,
            next_group_index=first + num_groups + 1,
            source={},
            ledger=LedgerCounts(drawn=first + 3, trained=first + 2, dropped=step + 1),
        ),
    )
