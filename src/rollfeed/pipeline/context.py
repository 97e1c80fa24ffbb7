"""What one step works with: draws, running groups, the abort at its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from rollfeed.errors import PromptsEndedError
from rollfeed.pipeline.groups.gate import EngineGate
from rollfeed.pipeline.groups.group_runner import GroupRunner
from rollfeed.pipeline.groups.in_flight import Draft, InFlight
from rollfeed.pipeline.ledger import Ledger, Place
from rollfeed.pipeline.supply import PromptSupply
from rollfeed.protocols import GroupFilter, RolloutObserver, Running
from rollfeed.types import FilterDecision, Group, GroupResult, GroupStatus, PromptDraw

_log = logging.getLogger(__name__)
_ABORT_AGAIN_SECONDS = 0.2  # a request may have been on its way to the engine when it was told to abort


class StepContext:
    """Fits :class:`rollfeed.protocols.RolloutContext`.

    Invariant: after :meth:`abort` or :meth:`close`, no group is under way and no request of one is at the engine.
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
        in_flight: InFlight,
        gate: EngineGate,
        group_filter: GroupFilter,
        observer: RolloutObserver,
        abort_grace_seconds: float,
    ) -> None:
        self.step = step
        self.rollout_batch_size = rollout_batch_size
        self.surplus = tuple(surplus)
        self.draws: dict[int, PromptDraw] = {flight.draft.draw.group_index: flight.draft.draw for flight in in_flight}
        """Everything drawn in this step, or left under way by earlier ones, by group index."""
        self.num_submitted = 0
        self.is_wanted = False
        self.is_ended = False
        """Whether everything under way has been stopped."""
        self.source_ended = False
        """Whether the newest draw gave fewer prompts than were asked for."""
        self._is_exhausted = False
        """Whether it gave none, and no group was under way that could still fill the batch."""
        self._supply = supply
        self._ledger = ledger
        self._runner = runner
        self._in_flight = in_flight
        self._gate = gate
        self._group_filter = group_filter
        self._observer = observer
        self._abort_grace_seconds = abort_grace_seconds
        self._running = {
            flight.draft.draw.group_index: Running(flight.task, flight.policy_version) for flight in in_flight
        }

    @property
    def policy_version(self) -> int:
        """As :attr:`rollfeed.protocols.RolloutContext.policy_version`."""
        return self._gate.policy_version

    @property
    def running(self) -> Mapping[int, Running]:
        """As :attr:`rollfeed.protocols.RolloutContext.running`."""
        return self._running

    def want(self) -> None:
        """Say that somebody waits for the batch."""
        self.is_wanted = True
        self._in_flight.ring()

    async def changed(self) -> None:
        """As :meth:`rollfeed.protocols.RolloutContext.changed`."""
        await self._in_flight.changed()

    async def draw(self, count: int) -> list[PromptDraw]:
        """As :meth:`rollfeed.protocols.RolloutContext.draw`."""
        if self._is_exhausted:
            raise PromptsEndedError(f"step {self.step} drew again after the prompt source has ended")
        draws = await self._supply.draw(count, policy_version=self.policy_version)
        self.draws |= {draw.group_index: draw for draw in draws}
        self.source_ended = len(draws) < count
        self._is_exhausted = self.source_ended and not draws and not self._pending()
        return draws

    def submit(self, draw: PromptDraw) -> asyncio.Task[GroupResult]:
        """As :meth:`rollfeed.protocols.RolloutContext.submit`.

        Raises:
            ValueError: If the draw is not of this step or was submitted before.
        """
        if draw.group_index not in self.draws or draw.group_index in self._in_flight:
            raise ValueError(f"group {draw.group_index} was not drawn in step {self.step}, or was submitted before")
        draft = Draft(draw, n_samples_per_prompt=self._runner.n_samples_per_prompt)
        self._ledger.move(draw.group_index, Place.IN_FLIGHT)
        self._observer.group_submitted(draw)
        self.num_submitted += 1
        return self._in_flight.start(draft, self._run(draft), policy_version=self.policy_version)

    def decide(self, group: Group) -> FilterDecision:
        """As :meth:`rollfeed.protocols.RolloutContext.decide`."""
        decision = self._group_filter(group.samples)
        self._observer.group_decided(group, decision)
        return decision

    async def abort(self) -> None:
        """As :meth:`rollfeed.protocols.RolloutContext.abort`."""
        self.is_ended = True
        self._gate.close()
        pending = self._pending()
        deadline = asyncio.get_running_loop().time() + self._abort_grace_seconds
        while pending and asyncio.get_running_loop().time() < deadline:
            await self._abort_engine()
            _, pending = await asyncio.wait(pending, timeout=_ABORT_AGAIN_SECONDS)
        await self._cancel(pending)

    async def close(self) -> None:
        """End whatever still runs, at once."""
        self.is_ended = True
        self._gate.close()
        await self._cancel(self._pending())

    def result(self, group_index: int) -> GroupResult | None:
        """Return how a group ended; None when it is not under way, still runs, or died with the step."""
        flight = self._in_flight.get(group_index)
        if flight is None or not flight.task.done() or flight.task.cancelled() or flight.task.exception() is not None:
            return None
        return flight.task.result()

    def rest(self, group_index: int) -> PromptDraw:
        """Return what a drawn group has so far, to go on from later."""
        flight = self._in_flight.get(group_index)
        if flight is None:
            return self.draws[group_index]
        result = self.result(group_index)
        if result is not None and result.status is GroupStatus.FINISHED:
            flight.draft.rollouts[:] = result.group.rollouts
        return flight.draft.rest()

    def _pending(self) -> set[asyncio.Task[GroupResult]]:
        return {flight.task for flight in self._in_flight if not flight.task.done()}

    async def _abort_engine(self) -> None:
        try:
            await self._gate.abort_all()
        except Exception as error:
            # One refusal must not end the drain: what does not stop in time is cancelled below.
            _log.warning("the engine refused to abort: %s", error)

    async def _cancel(self, tasks: set[asyncio.Task[GroupResult]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, draft: Draft) -> GroupResult:
        try:
            return await self._runner.run(draft, step=self.step)
        except asyncio.CancelledError:
            # Nobody but this class cancels the task, and what it had is in the draft.
            draw = draft.rest()
            group = Group(group_index=draw.group_index, prompt=draw.prompt, rollouts=draw.rollouts)
            return GroupResult(group=group, status=GroupStatus.ABORTED)
