"""Conversations to be replayed: made once from a seed, the same whoever chooses the servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollfeed.benchmarks.agents.tools import AgentsWorkload, wait_seconds
from rollfeed.benchmarks.schedule_workload import ScheduleMode
from rollfeed.seeds import derive_seed
from rollfeed.testing.fake_sglang import TimeModelSettings

_IDS = (1_000, 20_000)
"""Of tokens that are told; below those that fakes give a meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsWorkload(AgentsWorkload):
    """Agents' conversations with a tool between the turns; a group has one prompt, a task one beginning of prompts.

    Lengths of turns and waits for tools are those of the bench of agents; what it does not have is said here.
    """

    mode: ScheduleMode = ScheduleMode.ASYNC
    num_engines: int = 8
    num_slots: int = 4
    num_sessions: int = 600
    mean_turns: int = 16
    """Of a conversation."""
    turns_skew: float = 0.5
    """Exponent of Zipf's law by which turns are shared among the conversations; 0 gives each as many."""
    max_turns_share: float = 3.0
    """Most turns of a conversation, over the mean."""
    least_turns_share: float = 0.5
    num_tasks: int = 6
    task_tokens: int = 2_000
    """Of the beginning that all conversations of a task share: its instructions and tools."""
    task_skew: float = 1.0
    """Exponent of Zipf's law by which groups are shared among the tasks."""
    prompt_tokens: int = 400
    """Of a group's problem."""
    told_tokens: int = 250
    """Mean of the tool's answers, lognormal."""
    arrival_seconds: float = 30.0
    """In which the groups come, at random times."""
    kv_budget_tokens: int = 400_000
    """Of one server."""
    page_tokens: int = 64
    step_us_per_request: float = 50.0
    prefill_us_per_token: float = 20.0
    """Of tokens that are not cached."""

    @property
    def fleet_model(self) -> TimeModelSettings:
        """The model of the servers' time and memory."""
        return TimeModelSettings(
            num_slots=self.num_slots,
            step_ms=self.step_ms,
            step_ms_per_request=self.step_us_per_request / 1e3,
            prefill_us_per_token=self.prefill_us_per_token,
            prefix_cache=True,
            page_tokens=self.page_tokens,
            kv_budget_tokens=self.kv_budget_tokens,
            seed=self.seed,
        )


class SessionTurn(NamedTuple):
    """One request of a conversation."""

    told: NDArray[np.int32]
    """What comes behind the turns before it."""
    num_sampled: int
    wait_seconds: float
    """Of the tool, after it."""


class SessionTrace(NamedTuple):
    """One conversation; what it samples depends on nothing but its name."""

    name: str
    group: str
    arrival: float
    """Seconds from the start."""
    turns: list[SessionTurn]


def make_sessions(workload: SessionsWorkload) -> list[SessionTrace]:
    """Return all conversations, in the order of their arrival."""
    random = np.random.default_rng(derive_seed("sessions", workload.seed))
    size = workload.n_samples_per_prompt
    num_groups = -(-workload.num_sessions // size)
    tasks = [_told(random, workload.task_tokens) for _ in range(workload.num_tasks)]
    popularity = np.arange(1.0, workload.num_tasks + 1) ** -workload.task_skew
    task_of = random.choice(workload.num_tasks, num_groups, p=popularity / popularity.sum())
    arrivals = np.sort(random.uniform(0.0, workload.arrival_seconds, num_groups))
    turns = random.permutation(turns_by_rank(workload))
    sessions = []
    for index in range(workload.num_sessions):
        group = index // size
        own = np.random.default_rng(derive_seed("session", workload.seed, index))
        problem = _told(np.random.default_rng(derive_seed("problem", workload.seed, group)), workload.prompt_tokens)
        first = np.concatenate([tasks[task_of[group]], problem])
        made = _turns(workload, own, first, int(turns[index]))
        sessions.append(SessionTrace(f"session-{index}", f"group-{group}", float(arrivals[group]), made))
    return sessions


def turns_by_rank(workload: SessionsWorkload) -> NDArray[np.int64]:
    """Return the turns of each conversation, most first."""
    shares = np.arange(1.0, workload.num_sessions + 1) ** -workload.turns_skew
    limits = (workload.least_turns_share * workload.mean_turns, workload.max_turns_share * workload.mean_turns)
    scale = workload.mean_turns / shares.mean()
    for _ in range(20):  # what is cut off at the limits is given to the others
        turns = np.clip(shares * scale, *limits)
        scale *= workload.mean_turns / turns.mean()
    whole: NDArray[np.int64] = np.maximum(1, np.rint(turns)).astype(np.int64)
    return whole


def _turns(
    workload: SessionsWorkload, random: np.random.Generator, first: NDArray[np.int32], num_turns: int
) -> list[SessionTurn]:
    sigma = np.hypot(workload.sigma_between, workload.sigma_within)
    sampled = np.clip(workload.median_length * np.exp(random.normal(0.0, sigma, num_turns)), 1, workload.max_length)
    told = workload.told_tokens * np.exp(random.normal(0.0, sigma, num_turns) - sigma**2 / 2)
    waits = wait_seconds(workload, random.normal(size=num_turns))
    return [
        SessionTurn(
            first if turn == 0 else _told(random, max(1, round(told[turn]))), round(sampled[turn]), float(waits[turn])
        )
        for turn in range(num_turns)
    ]


def _told(random: np.random.Generator, num_tokens: int) -> NDArray[np.int32]:
    return random.integers(*_IDS, num_tokens).astype(np.int32)
