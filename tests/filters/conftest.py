from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from rollfeed.testing import sample_of
from rollfeed.types import Correct, Reward, Sample, SampleStatus

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
        return sample_of(
            [0, 1],
            range(2, 2 + length),
            status=status,
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
