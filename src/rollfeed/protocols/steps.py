"""A step: what makes its batch, and what that may use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from rollfeed.types import BatchCut, ByAge, FilterDecision, Group, GroupResult, PromptDraw, RolloutOutput


class BatchFilter(Protocol):
    """Chooses a batch among more finished groups than it needs. *Extension point*.

    What it does not choose is dropped, counted as ``over_sampled``, and never comes back.
    """

    def __call__(self, groups: Sequence[Group]) -> Sequence[int]:
        """Return indices of ``groups``, each at most once, those first that are to be trained on.

        There must be at least as many as a batch has groups; the first ones make the batch.
        """


class AgeRule(Protocol):
    """Decides which groups are new enough to be trained on, and what becomes of the others."""

    def __call__(self, groups: Sequence[Group], *, policy_version: int) -> ByAge:
        """Sort groups for a batch that is stamped with ``policy_version``."""


class BatchCutter(Protocol):
    """Holds the limit on staleness, orders the kept groups of a step and gives every sample its advantage."""

    def __call__(self, groups: Sequence[Group], *, step: int, policy_version: int) -> BatchCut | ByAge:
        """Return the batch, with the metrics that its groups alone give; or, if some are too old, which."""


class Running(NamedTuple):
    """A group under way."""

    task: asyncio.Task[GroupResult]
    policy_version: int
    """The oldest version that its tokens can have."""


class RolloutContext(Protocol):
    """What a whole rollout function may use to make a step."""

    @property
    def step(self) -> int:
        """The step's number, from 0."""

    @property
    def rollout_batch_size(self) -> int:
        """Groups to deliver. A function whose groups were too old is called again, for as many as are missing."""

    @property
    def surplus(self) -> Sequence[Group]:
        """Groups that were finished and kept earlier, by index; those that the output does not name stay so."""

    @property
    def policy_version(self) -> int:
        """The engine's version now."""

    @property
    def running(self) -> Mapping[int, Running]:
        """Groups that earlier steps left under way, by index; empty but in ``async`` mode."""

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for the batch; in ``async`` mode a step begins before that."""

    async def changed(self) -> None:
        """Return when a submitted group has ended or the batch has become wanted, since the last call."""

    async def draw(self, count: int) -> Sequence[PromptDraw]:
        """Take prompts: requeued ones first, then new ones; fewer only when the source has ended.

        A function whose batch is then short returns what it has: the run ends there, with the batches before.

        Raises:
            PromptsEndedError: If nothing was left the last time, and no group is under way.
        """

    def submit(self, draw: PromptDraw) -> asyncio.Task[GroupResult]:
        """Start generating and scoring one group; the task never raises but for cancellation or a spent budget."""

    def decide(self, group: Group) -> FilterDecision:
        """Apply the group filters."""

    def requeue(self, group: Group) -> None:
        """Have a finished group answered again from the beginning, because it is too old; it is drawn before new ones.

        Its tokens count as wasted; the output may not name it.
        """

    async def abort(self) -> None:
        """End all submitted work within the grace period; afterwards every task is done."""


class RolloutFn(Protocol):
    """Makes a whole step. *Extension point*; the default is ``pipeline.scheduler``."""

    async def __call__(self, context: RolloutContext) -> RolloutOutput:
        """Return exactly ``rollout_batch_size`` scored groups, and where the others went.

        Groups whose tokens are older than ``max_staleness`` allows when the batch is cut are not delivered: the
        function is called again, in the same step, for what is missing then.
        """
