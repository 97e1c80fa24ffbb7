"""The context of one step: what it has drawn, groups in flight, the abort at its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rollfeed.errors import PromptsEndedError
from rollfeed.pipeline.groups.gate import EngineGate
from rollfeed.pipeline.groups.group_runner import START_ROLLOUT_ID, GroupRunner
from rollfeed.pipeline.ledger import Ledger
from rollfeed.pipeline.supply import PromptSupply
from rollfeed.protocols import GroupFilter, RolloutObserver, RunningGroup
from rollfeed.types import STALE, Ending, FilterDecision, Group, Place, Requeued, Rollout, Sample

_log = logging.getLogger(__name__)
_ABORT_AGAIN_SECONDS = 0.2  # a request may have been on its way to the engine when it was told to abort


class InFlight:
    """All groups in flight, and what wakes who waits for one of them.

    Invariant: a group is in here from its submission until somebody has taken its result or its rest.
    """

    def __init__(self) -> None:
        self.groups: dict[int, RunningGroup] = {}
        """By index, in the order in which they were submitted."""
        self._changed = asyncio.Event()
        self._ended: set[int] = set()
        """Groups whose end :meth:`changed` has not told."""

    def start(self, running: RunningGroup, work: Callable[[], Awaitable[Group]]) -> None:
        """Begin to work on a group; where that is cancelled, the result is what there is by then."""

        async def work_on() -> Group:
            try:
                return await work()
            except asyncio.CancelledError:
                # Nobody but StepContext cancels the task.
                return running.rest()

        group_index = running.group.group_index
        running.task = asyncio.create_task(work_on(), name=f"group {group_index}")
        running.task.add_done_callback(partial(self._end, group_index))
        self.groups[group_index] = running

    def pending(self) -> set[asyncio.Task[Group]]:
        """Return the tasks that still run."""
        return {running.task for running in self.groups.values() if not running.task.done()}

    def ring(self) -> None:
        """Wake who waits in :meth:`changed`."""
        self._changed.set()

    async def changed(self) -> Collection[int]:
        """Return when a group has ended, or :meth:`ring` was called, since the last call; return which have."""
        await self._changed.wait()
        self._changed.clear()
        ended, self._ended = self._ended, set()
        return ended

    def take(self, group_index: int) -> None:
        """Have a group no longer, if it is here."""
        self.groups.pop(group_index, None)
        self._ended.discard(group_index)

    def _end(self, group_index: int, task: asyncio.Task[Group]) -> None:
        # Several groups may end with an error, and only the first one is read: none is left to asyncio to complain of.
        if not task.cancelled():
            task.exception()
        if group_index in self.groups:
            self._ended.add(group_index)
        self._changed.set()


@dataclass(slots=True, kw_only=True)
class StepContext:
    """Fits :class:`rollfeed.protocols.RolloutContext`.

    Invariant: after :meth:`abort` or :meth:`close`, no group is in flight and no request of one is at the engine.
    """

    step: int
    rollout_batch_size: int
    supply: PromptSupply
    ledger: Ledger
    runner: GroupRunner
    in_flight: InFlight
    gate: EngineGate
    group_filter: GroupFilter
    observer: RolloutObserver
    abort_grace_seconds: float
    surplus: tuple[Group, ...] = ()
    is_wanted: bool = False
    is_ended: bool = False
    """Whether everything in flight has been stopped."""
    source_ended: bool = False
    """Whether the newest draw gave fewer prompts than were asked for."""
    _is_exhausted: bool = False
    """Whether it gave none, and no group was in flight that could still fill the batch."""
    _drawn: dict[int, Group] = field(default_factory=dict)
    """Not submitted and not given back, by index."""

    @property
    def policy_version(self) -> int:
        return self.gate.policy_version

    @property
    def running(self) -> Mapping[int, RunningGroup]:
        return self.in_flight.groups

    def want(self) -> None:
        """Say that somebody waits for the batch."""
        self.is_wanted = True
        self.in_flight.ring()

    async def changed(self) -> Collection[int]:
        return await self.in_flight.changed()

    async def draw(self, count: int) -> list[Group]:
        if self._is_exhausted:
            raise PromptsEndedError(f"step {self.step} drew again after the prompt source has ended")
        groups = await self.supply.draw(count, policy_version=self.policy_version)
        self._drawn |= {group.group_index: group for group in groups}
        self.source_ended = len(groups) < count
        self._is_exhausted = self.source_ended and not groups and not self.in_flight.pending()
        return groups

    def submit(self, group: Group) -> asyncio.Task[Group]:
        """As :meth:`rollfeed.protocols.RolloutContext.submit`.

        Raises:
            ValueError: If the group was not drawn in this step, or was submitted before.
        """
        if group.group_index not in self._drawn:
            raise ValueError(f"group {group.group_index} was not drawn in step {self.step}, or was submitted before")
        running = RunningGroup.of(
            group, n_samples_per_prompt=self.runner.n_samples_per_prompt, policy_version=self.policy_version
        )
        self.ledger.submit(group.group_index)
        self.observer.group_submitted(group)
        del self._drawn[group.group_index]
        self.in_flight.start(running, partial(self.runner.run, running, step=self.step))
        return running.task

    def requeue(self, group: Group) -> None:
        """As :meth:`rollfeed.protocols.RolloutContext.requeue`.

        Raises:
            ValueError: If the group still runs, or is not of this step.
        """
        group_index = group.group_index
        running = self.in_flight.groups.get(group_index)
        if self.ledger.place(group_index) not in (Place.IN_FLIGHT, Place.SURPLUS) or (
            running is not None and not running.task.done()
        ):
            raise ValueError(f"group {group_index} is not a finished group of step {self.step}")
        self.surplus = tuple(each for each in self.surplus if each.group_index != group_index)
        self.give_back([Requeued(group, STALE)])

    def requeue_rest(self, others: Iterable[Group] = (), *, keep_partial: bool) -> None:
        """Give back what was drawn and has no ending; what stays in flight after the step stays.

        With ``keep_partial`` groups take along what they have.
        """
        rest = [*self._drawn.values(), *others]
        if self.is_ended:
            rest += [running.rest() for running in self.in_flight.groups.values()]
        self.give_back(
            [
                Requeued(group, "unfinished", kept=_with_start_rollout_id(group, self.step) if keep_partial else None)
                for group in rest
            ]
        )

    def give_back(self, endings: Sequence[Requeued]) -> None:
        """Book groups that are to be answered again, and have them wait."""
        self.take(ending.group for ending in endings)
        for ending in endings:
            self.book(ending)
        self.supply.requeue([ending.waiting for ending in endings])
        if endings:
            self.source_ended = self._is_exhausted = False

    def indices(self) -> set[int]:
        """Return which groups were drawn in the step, or left to it, and have no ending yet."""
        return {group.group_index for group in self.surplus} | self.in_flight.groups.keys() | self._drawn.keys()

    def take(self, groups: Iterable[Group]) -> None:
        """Have no longer in flight or waiting in the step what has an ending now."""
        for group in groups:
            self._drawn.pop(group.group_index, None)
            self.in_flight.take(group.group_index)

    def book(self, ending: Ending) -> None:
        """Book where a group went; what its rollouts did in their turns is forgotten unless it is resumed."""
        if not isinstance(ending, Requeued) and self.ledger.place(ending.group.group_index) is Place.REQUEUED:
            self.ledger.submit(ending.group.group_index)  # the rollout function has answered it itself
        self.ledger.book(ending)
        if not isinstance(ending, Requeued) or ending.kept is None:
            self.runner.journal.forget(ending.group.group_index, step=self.step)

    def reopen(self, *, missing: int) -> None:
        """Prepare for another call of the rollout function, for the ``missing`` groups."""
        self.rollout_batch_size = missing
        if self.is_ended:
            self.is_ended = False
            self.gate.open()

    def decide(self, group: Group) -> FilterDecision:
        decision = self.group_filter(group.samples)
        self.observer.group_decided(group, decision)
        return decision

    async def abort(self) -> None:
        self.is_ended = True
        self.gate.close()
        pending = self.in_flight.pending()
        deadline = asyncio.get_running_loop().time() + self.abort_grace_seconds
        while pending and asyncio.get_running_loop().time() < deadline:
            await self._abort_engine()
            _, pending = await asyncio.wait(pending, timeout=_ABORT_AGAIN_SECONDS)
        await self.close()

    async def close(self) -> None:
        """End whatever still runs, at once."""
        self.is_ended = True
        self.gate.close()
        pending = self.in_flight.pending()
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _abort_engine(self) -> None:
        try:
            await self.gate.abort_all()
        except Exception as error:
            # One refusal must not end the drain: what does not stop in time is cancelled below.
            _log.warning("the engine refused to abort: %s", error)


def _with_start_rollout_id(group: Group, step: int) -> tuple[Rollout, ...]:
    """Return the rollouts with the step noted, once, in the metadata of every sample that has a response."""

    def noted(sample: Sample) -> Sample:
        if not sample.response_length or START_ROLLOUT_ID in sample.metadata:
            return sample
        return replace(sample, metadata={**sample.metadata, START_ROLLOUT_ID: step})

    return tuple(
        replace(rollout, samples=tuple(noted(sample) for sample in rollout.samples)) for rollout in group.rollouts
    )
