"""What one step works with: draws, running groups, the abort at its end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rollfeed.errors import PromptsEndedError
from rollfeed.pipeline.groups.gate import EngineGate
from rollfeed.pipeline.groups.group_runner import START_ROLLOUT_ID, GroupRunner
from rollfeed.pipeline.groups.in_flight import Draft, InFlight
from rollfeed.pipeline.ledger import Ledger, Place
from rollfeed.pipeline.supply import PromptSupply
from rollfeed.protocols import GroupFilter, RolloutObserver, Running
from rollfeed.types import STALE, FilterDecision, Group, GroupResult, GroupStatus, PromptDraw, Rollout, Sample

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
        self.surplus: tuple[Group, ...] = ()
        self.draws: dict[int, PromptDraw] = {flight.draft.draw.group_index: flight.draft.draw for flight in in_flight}
        """Everything drawn in this step, or left under way by earlier ones, and not given back, by group index."""
        self.num_submitted = 0
        self.num_requeued = 0
        """Groups given back, to be drawn again."""
        self.num_stale = 0
        """Of these, those that were too old."""
        self.wasted_tokens: Counter[str] = Counter()
        """Tokens of the step that will not be trained on, by reason."""
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
        self._running = _running(in_flight)

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

    def requeue(self, group: Group) -> None:
        """As :meth:`rollfeed.protocols.RolloutContext.requeue`.

        Raises:
            ValueError: If the group still runs, or is not of this step.
        """
        group_index = group.group_index
        flight = self._in_flight.get(group_index)
        if self._ledger.place(group_index) not in (Place.IN_FLIGHT, Place.SURPLUS) or (
            flight is not None and not flight.task.done()
        ):
            raise ValueError(f"group {group_index} is not a finished group of step {self.step}")
        self.surplus = tuple(each for each in self.surplus if each.group_index != group_index)
        self.num_stale += 1
        self.wasted_tokens[STALE] += group.response_tokens
        self._give_back([PromptDraw(group_index, group.prompt)])

    def requeue_rest(self, named: Collection[int], *, keep_partial: bool) -> None:
        """Give back what was drawn and is not named; what goes on after the step stays.

        Args:
            named: Groups whose fate is decided, by index.
            keep_partial: Whether groups take along what they have.
        """
        given_back = []
        for group_index, draw in self.draws.items():
            if group_index in named or (group_index in self._in_flight and not self.is_ended):
                continue
            rest = self._rest(group_index)
            if not keep_partial:
                self.wasted_tokens["requeued"] += rest.response_tokens
                rest = draw._replace(rollouts=())
            given_back.append(_with_start_rollout_id(rest, self.step))
        self._give_back(given_back)

    def reopen(self, named: Collection[int], *, missing: int) -> None:
        """Prepare for another call of the rollout function, for the ``missing`` groups.

        Args:
            named: Groups that have finished, by index.
            missing: How many groups the batch still needs.
        """
        self.rollout_batch_size = missing
        self._running = {each: running for each, running in _running(self._in_flight).items() if each not in named}
        if self.is_ended:
            self.is_ended = False
            self._gate.open()

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

    def _give_back(self, draws: Sequence[PromptDraw]) -> None:
        for draw in draws:
            self.draws.pop(draw.group_index, None)
            self._in_flight.remove(draw.group_index)
            if self._ledger.place(draw.group_index) is not Place.REQUEUED:
                self._ledger.move(draw.group_index, Place.REQUEUED)
        self.num_requeued += len(draws)
        self._supply.requeue(draws)
        if draws:
            self.source_ended = self._is_exhausted = False

    def _rest(self, group_index: int) -> PromptDraw:
        """Return what a drawn group has so far, to go on from later."""
        flight = self._in_flight.get(group_index)
        if flight is None:
            return self.draws[group_index]
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


def _running(in_flight: InFlight) -> dict[int, Running]:
    return {flight.draft.draw.group_index: Running(flight.task, flight.policy_version) for flight in in_flight}


def _with_start_rollout_id(draw: PromptDraw, step: int) -> PromptDraw:
    """Return the prompt with the step noted, once, in the metadata of every sample that has a response."""

    def noted(sample: Sample) -> Sample:
        if not sample.response_length or START_ROLLOUT_ID in sample.metadata:
            return sample
        return replace(sample, metadata={**sample.metadata, START_ROLLOUT_ID: step})

    def of(rollout: Rollout) -> Rollout:
        return replace(rollout, samples=tuple(noted(sample) for sample in rollout.samples))

    return draw._replace(rollouts=tuple(of(rollout) for rollout in draw.rollouts))
