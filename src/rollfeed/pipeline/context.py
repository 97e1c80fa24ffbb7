"""What one step works with: draws, running groups, the abort at its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rollfeed.pipeline.gate import EngineGate
from rollfeed.pipeline.group_runner import GroupRunner
from rollfeed.pipeline.ledger import Ledger, Place
from rollfeed.pipeline.supply import PromptSupply
from rollfeed.protocols import GroupFilter, RolloutObserver
from rollfeed.types import FilterDecision, Group, GroupResult, GroupStatus, PromptDraw

_log = logging.getLogger(__name__)
_ABORT_AGAIN_SECONDS = 0.2  # a request may have been on its way to the engine when it was told to abort


class StepContext:
    """Fits :class:`rollfeed.protocols.RolloutContext`; owns every task of its step.

    Invariant: after :meth:`abort`, no task of the step runs and no request of it is at the engine.
    """

    def __init__(
        self,
        *,
        step: int,
        rollout_batch_size: int,
        surplus: Sequence[Group],
        supply: PromptSupply,
        ledger: Ledger,
        runner: GroupRunner,
        gate: EngineGate,
        group_filter: GroupFilter,
        observer: RolloutObserver,
        abort_grace_seconds: float,
    ) -> None:
        self.step = step
        self.rollout_batch_size = rollout_batch_size
        self.surplus = tuple(surplus)
        self.draws: dict[int, PromptDraw] = {}
        """Everything drawn in this step, by group index."""
        self._supply = supply
        self._ledger = ledger
        self._runner = runner
        self._gate = gate
        self._group_filter = group_filter
        self._observer = observer
        self._abort_grace_seconds = abort_grace_seconds
        self._tasks: dict[int, asyncio.Task[GroupResult]] = {}
        self._ending = False

    async def draw(self, count: int) -> list[PromptDraw]:
        """As :meth:`rollfeed.protocols.RolloutContext.draw`."""
        draws = await self._supply.draw(count)
        self.draws |= {draw.group_index: draw for draw in draws}
        return draws

    def submit(self, draw: PromptDraw) -> asyncio.Task[GroupResult]:
        """As :meth:`rollfeed.protocols.RolloutContext.submit`.

        Raises:
            ValueError: If the draw is not of this step or was submitted before.
        """
        if draw.group_index not in self.draws or draw.group_index in self._tasks:
            raise ValueError(f"group {draw.group_index} was not drawn in step {self.step}, or was submitted before")
        self._ledger.move(draw.group_index, Place.IN_FLIGHT)
        self._observer.group_submitted(draw)
        task = asyncio.create_task(self._run(draw), name=f"group {draw.group_index}")
        self._tasks[draw.group_index] = task
        return task

    def decide(self, group: Group) -> FilterDecision:
        """As :meth:`rollfeed.protocols.RolloutContext.decide`."""
        decision = self._group_filter(group.samples)
        self._observer.group_decided(group, decision)
        return decision

    async def abort(self) -> None:
        """As :meth:`rollfeed.protocols.RolloutContext.abort`."""
        self._gate.close()
        pending = {task for task in self._tasks.values() if not task.done()}
        deadline = asyncio.get_running_loop().time() + self._abort_grace_seconds
        while pending and asyncio.get_running_loop().time() < deadline:
            await self._abort_engine()
            _, pending = await asyncio.wait(pending, timeout=_ABORT_AGAIN_SECONDS)
        await self._cancel(pending)

    async def close(self) -> None:
        """End whatever still runs, at once."""
        self._gate.close()
        await self._cancel({task for task in self._tasks.values() if not task.done()})

    def result(self, group_index: int) -> GroupResult | None:
        """Return how a submitted group ended; None when it was not submitted, or died with the step."""
        task = self._tasks.get(group_index)
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def _abort_engine(self) -> None:
        try:
            await self._gate.abort_all()
        except Exception as error:
            # One refusal must not end the drain: what does not stop in time is cancelled below.
            _log.warning("the engine refused to abort: %s", error)

    async def _cancel(self, tasks: set[asyncio.Task[GroupResult]]) -> None:
        self._ending = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, draw: PromptDraw) -> GroupResult:
        try:
            return await self._runner.run(draw, step=self.step)
        except asyncio.CancelledError:
            if not self._ending:
                raise
            group = Group(group_index=draw.group_index, prompt=draw.prompt, rollouts=())
            return GroupResult(group=group, status=GroupStatus.ABORTED)
