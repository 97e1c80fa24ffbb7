"""Scores the finished rollouts of a prompt.

Invariants: one verdict a rollout, in order; a call that failed, timed out or returned nonsense is a
TIMEOUT or ERROR verdict, never a reward of 0; a rollout that carries a reward keeps it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollfeed.errors import ConfigError, suggestion
from rollfeed.protocols import BatchedRewardFn, Grader, GroupRewardFn, RewardFn
from rollfeed.rewards.calls import call_within
from rollfeed.rewards.results import to_verdict
from rollfeed.types import Outcome, Prompt, Rollout, Sample, Verdict

_MAX_CALLS = 32
"""Reward calls at once; each plain function has a thread."""


class RewardHub:
    """Chooses who scores: a custom function, else the grader of the prompt's ``rm_type``, else of ``rm_type``.

    Args:
        graders: By ``rm_type``; the door for further graders.
        rm_type: Grader for prompts whose metadata names none.
        reward_fn: Scores a rollout by its last sample.
        batched_reward_fn: Scores all rollouts of a prompt in one call.
        group_reward_fn: As ``batched_reward_fn``, and is handed rollouts that carry a reward as well.
        reward_key: Which entry of a reward dictionary counts.
        timeout_seconds: Deadline of every single call.

    Raises:
        ConfigError: If ``rm_type`` is unknown, or more than one function is given.
    """

    def __init__(
        self,
        *,
        graders: Mapping[str, Grader],
        rm_type: str | None = None,
        reward_fn: RewardFn | None = None,
        batched_reward_fn: BatchedRewardFn | None = None,
        group_reward_fn: GroupRewardFn | None = None,
        reward_key: str | None = None,
        timeout_seconds: float,
    ) -> None:
        if sum(function is not None for function in (reward_fn, batched_reward_fn, group_reward_fn)) > 1:
            raise ConfigError("reward_fn, batched_reward_fn and group_reward_fn all score rollouts: set one of them")
        if rm_type is not None and rm_type not in graders:
            raise ConfigError(f"rm_type = {rm_type!r}: no such grader; {suggestion(rm_type, graders)}")
        self._graders = dict(graders)
        self._rm_type = rm_type
        self._reward_fn = reward_fn
        self._batched_reward_fn = batched_reward_fn
        self._group_reward_fn = group_reward_fn
        self._reward_key = reward_key
        self._timeout_seconds = timeout_seconds
        self._calls = asyncio.Semaphore(_MAX_CALLS)

    async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
        """Return one verdict a rollout, in order.

        Call it once, when all rollouts of the prompt have ended. An aborted or failed rollout gets an ERROR
        verdict; with a batched or group function so do the others of its prompt, and the function is not called.
        """
        verdicts = [_carried(rollout) for rollout in rollouts]
        missing = [position for position, verdict in enumerate(verdicts) if verdict is None]
        if missing:
            scored = await self._score_missing(rollouts, missing, prompt)
            verdicts = [scored.get(position, verdict) for position, verdict in enumerate(verdicts)]
        return [verdict for verdict in verdicts if verdict is not None]

    async def _score_missing(
        self, rollouts: Sequence[Rollout], missing: Sequence[int], prompt: Prompt
    ) -> dict[int, Verdict]:
        if self._group_reward_fn is not None:
            verdicts = await self._score_together(
                rollouts, lambda samples: self._call(self._group_reward_fn, samples, prompt)
            )
            return {position: verdicts[position] for position in missing}
        chosen = [rollouts[position] for position in missing]
        if self._batched_reward_fn is not None:
            prompts = [prompt] * len(chosen)
            verdicts = await self._score_together(
                chosen, lambda samples: self._call(self._batched_reward_fn, samples, prompts)
            )
        else:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._score_one(rollout, prompt)) for rollout in chosen]
            verdicts = [task.result() for task in running]
        return dict(zip(missing, verdicts, strict=True))

    async def _score_one(self, rollout: Rollout, prompt: Prompt) -> Verdict:
        if not rollout.has_finished:
            return _error(f"not scored: the rollout is {rollout.status.value}")
        sample = rollout.samples[-1]
        if self._reward_fn is not None:
            result = await self._call(self._reward_fn, sample, prompt)
        else:
            grader = self._grader(prompt)
            if isinstance(grader, Verdict):
                return grader
            result = await self._call(grader, sample.response, prompt.label, prompt.metadata)
        return to_verdict(result, reward_key=self._reward_key)

    async def _score_together(
        self, rollouts: Sequence[Rollout], call: Callable[[list[Sample]], Awaitable[Any]]
    ) -> list[Verdict]:
        unfinished = [rollout for rollout in rollouts if not rollout.has_finished]
        if unfinished:
            status = unfinished[0].status.value
            return [_error(f"not scored: rollout {unfinished[0].rollout_id} of the group is {status}")] * len(rollouts)
        results = await call([rollout.samples[-1] for rollout in rollouts])
        if isinstance(results, Verdict):
            return [results if results.outcome is not Outcome.OK else _not_a_list(results, rollouts)] * len(rollouts)
        results = results.tolist() if isinstance(results, np.ndarray) and results.ndim == 1 else results
        if not isinstance(results, Sequence) or isinstance(results, str | bytes) or len(results) != len(rollouts):
            return [_not_a_list(results, rollouts)] * len(rollouts)
        return [to_verdict(result, reward_key=self._reward_key) for result in results]

    async def _call(self, function: Callable[..., Any] | None, *args: Any) -> Any:
        assert function is not None
        async with self._calls:
            outcome = await call_within(function, *args, timeout_seconds=self._timeout_seconds)
        return outcome if isinstance(outcome, Verdict) else outcome.value

    def _grader(self, prompt: Prompt) -> Grader | Verdict:
        rm_type = prompt.metadata.get("rm_type", self._rm_type)
        if rm_type is None:
            return _error("no rm_type: name a grader in the prompt's metadata or in the settings")
        if not isinstance(rm_type, str) or rm_type not in self._graders:
            remedy = suggestion(str(rm_type), self._graders)
            return _error(f"rm_type {rm_type!r:.80} of the prompt's metadata: no such grader; {remedy}")
        return self._graders[rm_type]


def _carried(rollout: Rollout) -> Verdict | None:
    """Return the verdict of a rollout that is scored already."""
    if rollout.verdict is not None and rollout.verdict.outcome is Outcome.OK:
        return rollout.verdict
    reward = rollout.samples[-1].reward if rollout.samples else None
    return None if reward is None else Verdict(reward=reward)


def _error(detail: str) -> Verdict:
    return Verdict(reward=None, outcome=Outcome.ERROR, detail=detail)


def _not_a_list(results: Any, rollouts: Sequence[Rollout]) -> Verdict:
    got = f"{len(results)} results" if isinstance(results, Sequence | np.ndarray) else f"a {type(results).__name__}"
    return _error(f"it returned {got} for {len(rollouts)} rollouts; it must return a list with one result each")
