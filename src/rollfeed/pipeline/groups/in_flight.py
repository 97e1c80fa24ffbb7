"""Groups under way: what each has so far, and the task that goes on with it.

Invariant: a group is in here from its submission until somebody has taken its result or its rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from rollfeed.types import GroupResult, PromptDraw, Rollout, SampleStatus


class Draft:
    """What a group has so far, one rollout a member; filled by its runner, read by whoever stops it.

    Raises:
        ValueError: If an earlier execution left another number of rollouts than a group has.
    """

    def __init__(self, draw: PromptDraw, *, n_samples_per_prompt: int) -> None:
        if draw.rollouts and len(draw.rollouts) != n_samples_per_prompt:
            raise ValueError(
                f"group {draw.group_index} has {len(draw.rollouts)} rollouts, n_samples_per_prompt is "
                f"{n_samples_per_prompt}"
            )
        first = draw.group_index * n_samples_per_prompt
        self.draw = draw
        self.rollouts = list(draw.rollouts) or [
            Rollout(rollout_id=first + member, samples=()) for member in range(n_samples_per_prompt)
        ]

    def mask_finished(self, policy_version: int) -> None:
        """Take the weight of tokens of older versions from the members that have finished."""
        self.rollouts[:] = [
            rollout.without_versions_before(policy_version) if rollout.has_finished else rollout
            for rollout in self.rollouts
        ]

    def rest(self) -> PromptDraw:
        """Return the prompt with what its members have: finished rollouts, and aborted ones to be gone on with."""
        kept = tuple(
            rollout
            if rollout.has_finished or rollout.status is SampleStatus.ABORTED
            else Rollout(rollout_id=rollout.rollout_id, samples=())
            for rollout in self.rollouts
        )
        return self.draw._replace(rollouts=kept if any(rollout.samples for rollout in kept) else ())


@dataclass(frozen=True, slots=True)
class Flight:
    """One group under way."""

    draft: Draft
    task: asyncio.Task[GroupResult]
    policy_version: int
    """The oldest version that its tokens can have."""


class InFlight:
    """All groups under way, in the order in which they were submitted."""

    def __init__(self) -> None:
        self._flights: dict[int, Flight] = {}
        self._changed = asyncio.Event()

    def __contains__(self, group_index: int) -> bool:
        return group_index in self._flights

    def __iter__(self) -> Iterator[Flight]:
        return iter(tuple(self._flights.values()))

    def start(
        self, draft: Draft, work: Coroutine[Any, Any, GroupResult], *, policy_version: int
    ) -> asyncio.Task[GroupResult]:
        """Begin to work on a group."""
        group_index = draft.draw.group_index
        task = asyncio.create_task(work, name=f"group {group_index}")
        task.add_done_callback(self._ring)
        oldest = min(
            (
                version
                for rollout in draft.rollouts
                for sample in rollout.samples
                if (version := sample.oldest_trained_version) is not None
            ),
            default=policy_version,
        )
        self._flights[group_index] = Flight(draft, task, min(oldest, policy_version))
        return task

    def get(self, group_index: int) -> Flight | None:
        """Return a group that is in here."""
        return self._flights.get(group_index)

    def remove(self, group_index: int) -> None:
        """Forget a group whose fate is decided."""
        self._flights.pop(group_index, None)

    def clear(self) -> None:
        """Forget all."""
        self._flights.clear()

    def ring(self) -> None:
        """Wake who waits in :meth:`changed`."""
        self._changed.set()

    async def changed(self) -> None:
        """Return when a group has ended, or :meth:`ring` was called, since the last call."""
        await self._changed.wait()
        self._changed.clear()

    def _ring(self, task: asyncio.Task[GroupResult]) -> None:
        # Several groups may end with an error, and only the first one is read: none is left to asyncio to complain of.
        if not task.cancelled():
            task.exception()
        self._changed.set()
