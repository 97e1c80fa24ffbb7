from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollfeed.types import Prompt, Rollout, Sample, SampleStatus, VersionSpan


@pytest.fixture
def make_prompt() -> Callable[..., Prompt]:
    def make(label: Any = None, **metadata: Any) -> Prompt:
        return Prompt(
            prompt_id="p", source="s", text="?", token_ids=np.zeros(2, np.int32), label=label, metadata=metadata
        )

    return make


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    def sample(rollout_id: int, response: str, status: SampleStatus, reward: Any) -> Sample:
        return Sample(
            token_ids=np.zeros(3, np.int32),
            response_length=1,
            loss_mask=np.ones(1, np.float32),
            logprobs=np.zeros(1, np.float32),
            version_spans=(VersionSpan(0, 1, 0),),
            status=status,
            group_index=0,
            index=rollout_id,
            rollout_id=rollout_id,
            response=response,
            reward=reward,
        )

    def make(
        rollout_id: int, *responses: str, status: SampleStatus = SampleStatus.COMPLETED, reward: Any = None
    ) -> Rollout:
        samples = tuple(sample(rollout_id, response, status, reward) for response in responses)
        return Rollout(rollout_id=rollout_id, samples=samples)

    return make
