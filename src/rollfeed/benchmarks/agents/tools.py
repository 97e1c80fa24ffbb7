"""Rollouts of several turns with a tool between them, as work for a scheduler; waits for the tool have a heavy tail."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rollfeed.benchmarks.schedule_workload import ScheduleWorkload
from rollfeed.generate import Episode
from rollfeed.protocols import GenerateFn, RolloutRequest, Services
from rollfeed.seeds import derive_seed
from rollfeed.types import FinishKind, Sample

_LONGEST_WAIT = 30.0
"""Over the median: tools have a time limit."""
_NUM_SIMULATED_GROUPS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsWorkload(ScheduleWorkload):
    """Rollouts of several turns with a tool between them; a turn has half the tokens of a rollout of one."""

    num_steps: int = 32
    median_length: float = 100.0
    max_length: int = 819
    mean_turns: int = 4
    """Of a rollout, which has from 1 to twice as many less 1."""
    told_tokens: int = 20
    """The tool's answer."""
    median_wait_seconds: float = 0.4
    sigma_wait: float = 1.25
    """Of the logarithm."""
    prefill_us_per_token: float = 0.2
    """A tenth of what a token takes otherwise: engines have the earlier turns of a rollout in their prefix cache."""
    weight_updates: bool = True

    @property
    def max_turns(self) -> int:
        """The most turns of a rollout."""
        return 2 * self.mean_turns - 1

    @property
    def max_response_tokens(self) -> int:
        """Tokens of the longest response, of all its turns."""
        return self.max_turns * (self.max_length + self.told_tokens)

    @property
    def generate_fn(self) -> GenerateFn:
        """Answers a prompt in turns."""
        return partial(_with_tool, workload=self)

    def longest_over_mean(self) -> float:
        """Return how long a group is in flight, over how long one of its responses holds a slot."""
        random = np.random.default_rng(self.seed)
        shape = (_NUM_SIMULATED_GROUPS, self.n_samples_per_prompt, self.max_turns)
        num_turns = random.integers(1, self.max_turns + 1, shape[:2])[..., None]
        is_turn = np.arange(self.max_turns) < num_turns
        sigma = math.hypot(self.sigma_between, self.sigma_within)
        lengths = np.clip(self.median_length * np.exp(random.normal(0.0, sigma, shape)), 1, self.max_length) * is_turn
        waits = wait_seconds(self, random.normal(size=shape)) * (is_turn & (np.arange(self.max_turns) > 0))
        busy = lengths.sum(-1) * self.time_model.step_seconds(self.num_slots)
        return float((busy + waits.sum(-1)).max(axis=1).mean() / busy.mean())


def wait_seconds(workload: AgentsWorkload, normal: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return seconds of tools, capped lognormal."""
    return workload.median_wait_seconds * np.minimum(np.exp(workload.sigma_wait * normal), _LONGEST_WAIT)


async def _with_tool(request: RolloutRequest, *, services: Services, workload: AgentsWorkload) -> Sequence[Sample]:
    random = np.random.default_rng(derive_seed("agents", workload.seed, request.rollout_id))
    num_turns = int(random.integers(1, workload.max_turns + 1))
    waits = wait_seconds(workload, random.normal(size=num_turns)).tolist()
    told = np.full(workload.told_tokens, ord("t"), np.int32)
    episode = Episode(request, services)
    last = await episode.sample()
    for turn in range(1, num_turns):
        if last.finish_reason.kind is not FinishKind.STOP:
            break
        await episode.call("wait", turn, partial(asyncio.sleep, waits[turn]), if_lost=None)
        episode.insert(told)
        last = await episode.sample()
    return episode.end(last)


def mean_wait_seconds(workload: AgentsWorkload) -> float:
    """Return the expected seconds of one call of the tool."""
    return float(wait_seconds(workload, np.random.default_rng(workload.seed).normal(size=1 << 16)).mean())
