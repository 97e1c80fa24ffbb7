from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from rollfeed.types import Correct, Reward, Sample, SampleStatus, VersionSpan

SampleMaker = Callable[..., Sample]


@pytest.fixture
def make_sample() -> SampleMaker:
    def make(
        index: int = 0,
        *,
        reward: Reward | None = 0.0,
        status: SampleStatus = SampleStatus.COMPLETED,
        length: int = 3,
        response: str | None = None,
        rollout_id: int | None = None,
        correct: Correct = Correct.UNDEFINED,
    ) -> Sample:
        return Sample(
            token_ids=np.arange(2 + length, dtype=np.int32),
            response_length=length,
            loss_mask=np.ones(length, np.float32),
            logprobs=np.full(length, -0.5, np.float32),
            version_spans=(VersionSpan(0, length, 0),) if length else (),
            status=status,
            group_index=0,
            index=index,
            rollout_id=index if rollout_id is None else rollout_id,
            response=f"answer {index}" if response is None else response,
            reward=reward,
            correct=correct,
        )

    return make


@pytest.fixture
def scored(make_sample: SampleMaker) -> Callable[[Sequence[Reward | None]], list[Sample]]:
    def make(rewards: Sequence[Reward | None]) -> list[Sample]:
        return [make_sample(index, reward=reward) for index, reward in enumerate(rewards)]

    return make
