"""Scorers: graders, reward functions, and what the pipeline asks of them."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollfeed.types import Prompt, Reward, Rollout, Sample, Verdict


class Grader(Protocol):
    """A reward by ``rm_type``: compares a response with a label."""

    def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        """Grade one response; ``metadata`` is the prompt's."""


class Scorer(Protocol):
    """Scores the finished rollouts of a prompt; what the reward hub is to the pipeline."""

    def scores_alone(self, rollout: Rollout, prompt: Prompt) -> bool:
        """Whether a finished rollout can be scored before the others of its prompt have finished."""
        return True

    async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> Sequence[Verdict]:
        """Return one verdict a rollout, in order, by its last sample; rollouts that carry a reward keep it.

        Those that are not scored alone come together with all others of their prompt.
        """


class Teacher(Protocol):
    """Says how likely another model finds what the policy has sampled; entered and left with the run."""

    async def __aenter__(self) -> Teacher: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def logprobs(self, sample: Sample) -> NDArray[np.float32]:
        """Return the log-probability of each response token of a finished sample, by its exact id. ``(R,)``.

        Raises:
            EngineError: If there is none of a token that is trained on, or no answer in time. It is never 0 then.
        """
        raise NotImplementedError


class RewardFn(Protocol):
    """Scores one sample, as soon as it has finished. *Extension point*. May be plain (run in a thread) or async."""

    def __call__(self, sample: Sample, prompt: Prompt) -> Reward | Verdict | Awaitable[Reward | Verdict]:
        """Return a number, named numbers, or a verdict."""


class BatchedRewardFn(Protocol):
    """Scores the rollouts of a prompt in one call, after all have finished. *Extension point*.

    It is handed the samples that have no reward yet.
    """

    def __call__(
        self, samples: Sequence[Sample], prompts: Sequence[Prompt]
    ) -> Sequence[Reward | Verdict] | Awaitable[Sequence[Reward | Verdict]]:
        """Return one result a sample, in order."""


class GroupRewardFn(Protocol):
    """Scores a whole group at once, after all its members have finished. *Extension point*.

    It is handed all samples; those that have a reward keep it, whatever it returns.
    """

    def __call__(
        self, samples: Sequence[Sample], prompt: Prompt
    ) -> Sequence[Reward | Verdict] | Awaitable[Sequence[Reward | Verdict]]:
        """Return one result a sample, in order."""
