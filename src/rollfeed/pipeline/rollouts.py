"""The rollout manager: owns source, engine and what is left over between steps.

Invariants: leaving it ends every task it started; what is committed is what is delivered; a step
that fails gives its prompts back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rollfeed.base.waiting import until_done
from rollfeed.config import RolloutMode
from rollfeed.errors import PromptsEndedError, RunFailedError
from rollfeed.faults import blaming
from rollfeed.pipeline.collector import rare_collections
from rollfeed.pipeline.context import InFlight, StepContext
from rollfeed.pipeline.groups.failures import FailureBudget
from rollfeed.pipeline.groups.gate import EngineGate
from rollfeed.pipeline.groups.group_runner import GroupPlan, GroupRunner
from rollfeed.pipeline.groups.step_clock import Activity, StepClock
from rollfeed.pipeline.ledger import Ledger
from rollfeed.pipeline.observers import Observers
from rollfeed.pipeline.placement import Placement
from rollfeed.pipeline.returned import ROLLOUT_SETTING, checked, too_old
from rollfeed.pipeline.supply import PromptSupply
from rollfeed.pipeline.watchdog import LoopWatch, Watchdog, describe_phases
from rollfeed.pipeline.weight_follower import WeightFollower
from rollfeed.protocols import (
    AgeRule,
    BatchCutter,
    Engine,
    GroupFilter,
    PromptBuffer,
    PromptSource,
    RolloutFn,
    WeightPublisher,
)
from rollfeed.types import (
    STALE,
    BatchCut,
    Dropped,
    Ending,
    Failed,
    Group,
    LedgerCounts,
    Place,
    Requeued,
    RunState,
    StepCommit,
    Surplus,
    TensorUpdate,
    TrainBatch,
    Trained,
    WeightProbe,
)

FAILED_REASON = "failed"
"""Of failed groups among the dropped ones of a commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """The functions and objects that make a run's steps of its groups; ``reward_metrics`` is asked once a step."""

    rollout_fn: RolloutFn
    group_filter: GroupFilter
    cut_batch: BatchCutter
    surplus_rule: AgeRule
    """Which groups that were kept by earlier steps may still be used."""
    buffer: PromptBuffer
    publisher: WeightPublisher
    placement: Placement = field(default_factory=Placement)
    weights: WeightFollower | None = None
    new_runner: Callable[..., GroupRunner] = GroupRunner
    """Called as :class:`GroupRunner` is."""
    reward_metrics: Callable[[], Mapping[str, float]] = dict


@dataclass(slots=True)
class _Step:
    """A step that is being made."""

    context: StepContext
    endings: list[Ending]
    """Of its groups, as far as they are known; booked when the batch has been cut."""
    task: asyncio.Task[object]
    """The present call of the rollout function."""
    started: float
    """By the monotonic clock."""
    tokens_before: int
    """Generated in the whole run."""

    @property
    def trained(self) -> list[Group]:
        """The groups of the batch so far."""
        return [ending.group for ending in self.endings if isinstance(ending, Trained)]


class Rollouts:
    """Makes batches, one at a time. Enter it with ``async with``; that starts the engine.

    In ``async`` mode the next step begins when a batch has been cut, and is made while nobody waits for its batch.
    """

    def __init__(
        self,
        *,
        plan: GroupPlan,
        parts: RolloutParts,
        source: PromptSource,
        engine: Engine,
        state: RunState | None,
        commit: Callable[[StepCommit], None] | None,
        observers: Observers,
        resources: AbstractAsyncContextManager[object] | None = None,
    ) -> None:
        self._settings = settings = plan.settings
        self._source, self._resources = source, resources
        self._engine, self._commit, self._parts, self._observers = engine, commit, parts, observers
        self._state = state or RunState(next_step=0, next_group_index=0, source={})
        self._surplus = self._state.surplus
        # Nobody works any more on what was in flight when the state was taken.
        requeued = sorted([*self._state.in_flight, *self._state.requeued], key=lambda group: group.group_index)
        self._ledger = Ledger(
            self._state.ledger,
            requeued=[group.group_index for group in requeued],
            surplus=[group.group_index for group in self._state.surplus],
        )
        parts.buffer.add(requeued)
        self._supply = PromptSupply(
            source, ledger=self._ledger, buffer=parts.buffer, placement=parts.placement, state=state
        )
        self._in_flight = InFlight()
        self._step: _Step | None = None
        self.clock = clock = StepClock() if parts.weights is None else parts.weights.clock
        """Where the time goes; it is told of what is done between two batches."""
        self._gate = EngineGate(engine, max_requests_in_flight=settings.max_requests_in_flight, clock=clock)
        self._failures = FailureBudget(settings, settled=self._state.outcomes)
        self.services = replace(plan.services, endpoint=self._gate)
        """What functions of the run may use; requests are bounded, and checked."""
        plan = replace(plan, services=self.services)
        self._runner = parts.new_runner(plan, gate=self._gate, failures=self._failures, observer=observers, clock=clock)

    async def __aenter__(self) -> Rollouts:
        async with AsyncExitStack() as entered:
            entered.enter_context(LoopWatch(seconds=self._settings.watchdog_seconds))
            if self._resources is not None:
                await entered.enter_async_context(self._resources)
            if isinstance(self._source, AbstractAsyncContextManager):
                await entered.enter_async_context(self._source)
            await self._engine.__aenter__()
            entered.push_async_exit(self._engine.__aexit__)
            if self._parts.weights is not None:
                entered.push_async_callback(self._parts.weights.close)
                if self._settings.mode is RolloutMode.ASYNC:
                    self._parts.weights.start()
            self._entered = entered.pop_all()
        self.clock.begin(Activity.TRAIN)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            if self._step is not None:
                await self._stop(self._step)
        finally:
            await self._entered.aclose()

    @property
    def next_step(self) -> int:
        """The number of the step that :meth:`generate_batch` makes next."""
        return self._state.next_step

    @property
    def ledger(self) -> LedgerCounts:
        """The number of prompts in every state, of all that were drawn so far."""
        return self._ledger.counts()

    async def update_weights(
        self, tensors: Mapping[str, Any], *, policy_version: int, probe: WeightProbe | None = None
    ) -> None:
        """Hand the engine new weights, by Hugging Face parameter name; see :class:`rollfeed.protocols.Engine`.

        The engine has to say of the texts of ``probe`` what they say; raises EngineError where it does not.
        """
        with self.clock.doing(Activity.PUBLISH):
            await self._parts.publisher.publish(TensorUpdate(tensors, policy_version=policy_version))
        await self.prove_weights(probe)

    async def prove_weights(self, probe: WeightProbe | None) -> None:
        """Compare the engine's weights with the publisher's, see docs/weights.md; raises as :meth:`update_weights`."""
        with self.clock.doing(Activity.PUBLISH):
            await self._parts.publisher.prove(probe)

    async def generate_batch(self) -> TrainBatch:
        """Make, store and return the next batch.

        Raises:
            PromptsEndedError: If the source has ended and what is left fills no batch.
            RunFailedError: If the step cannot be completed; its prompts are requeued and nothing is stored.
                An error from storing it leaves the manager unusable: make a new one from the last stored state.
        """
        with self.clock.interrupting(Activity.TRAIN):
            return await self._next_batch()

    async def _next_batch(self) -> TrainBatch:
        if self._parts.weights is not None:
            await self._parts.weights.before_step(self._state.next_step)
        step = self._step or self._begin()
        step.context.want()
        try:
            cut = await self._cut(step)
        except BaseException:
            await self._stop(step)
            raise
        if self._settings.mode is not RolloutMode.ASYNC:
            await step.context.close()
        commit = self._settle(step, cut)
        self._state, self._surplus, self._step = commit.state, commit.state.surplus, None
        if self._settings.mode is RolloutMode.ASYNC:
            self._step = self._begin()
        await self._store(commit)
        self._observers.step_finished(commit)
        return commit.batch

    def _begin(self) -> _Step:
        """Begin to make the next step."""
        self._observers.step_started(self._state.next_step)
        self._ledger.begin_step()
        self._parts.placement.begin_step()
        self._gate.open()
        context = StepContext(
            step=self._state.next_step,
            rollout_batch_size=self._settings.rollout_batch_size,
            supply=self._supply,
            ledger=self._ledger,
            runner=self._runner,
            in_flight=self._in_flight,
            gate=self._gate,
            group_filter=self._parts.group_filter,
            observer=self._observers,
            abort_grace_seconds=self._settings.abort_grace_seconds,
        )
        endings = self._offer_surplus(context, self._surplus)
        task = asyncio.create_task(self._watched(self._parts.rollout_fn, context), name=f"step {context.step}")
        return _Step(context, endings, task, time.monotonic(), self._runner.num_generated_tokens)

    async def _cut(self, step: _Step) -> BatchCut:
        """Call the rollout function until its groups are a batch that is new enough."""
        num_in_vain, context = 0, step.context
        while True:
            num_before, returned = len(step.trained), await self._returned(step)
            with blaming(ROLLOUT_SETTING, self._parts.rollout_fn):
                new = checked(returned, context, self._parts.rollout_fn, before=step.endings)
            context.take(ending.group for ending in new)
            step.endings += new
            cut = self._parts.cut_batch(step.trained, step=context.step, policy_version=self._engine.policy_version)
            if isinstance(cut, BatchCut):
                return cut
            num_in_vain = 0 if len(cut.fresh) > num_before else num_in_vain + 1
            num_submitted = self._ledger.num_submitted
            if num_in_vain == 2 or num_submitted >= (
                self._settings.max_draws_per_batch * self._settings.rollout_batch_size
            ):
                raise RunFailedError(too_old(context, cut, num_in_vain, num_submitted, self._settings.max_staleness))
            if self._settings.mode is not RolloutMode.ASYNC:
                await context.close()
            others = [each for each in step.endings if not isinstance(each, Trained | Surplus)]
            step.endings = [*map(Trained, cut.fresh), *others, *self._take_out(context, cut.old)]
            surplus = [ending.group for ending in new if isinstance(ending, Surplus)]
            context.requeue_rest(keep_partial=self._keeps_partial)
            step.endings += self._offer_surplus(context, surplus)
            context.reopen(missing=self._settings.rollout_batch_size - len(cut.fresh))
            step.task = asyncio.create_task(self._watched(self._parts.rollout_fn, context), name=step.task.get_name())

    async def _returned(self, step: _Step) -> object:
        try:
            return await step.task
        except PromptsEndedError as ended:
            if self._supply.failure is None:
                raise
            raise RunFailedError(f"{self._supply.failure}: {ended}") from ended

    def _offer_surplus(self, context: StepContext, surplus: Sequence[Group]) -> list[Ending]:
        """Offer a step what may still be trained on; return the endings of the rest."""
        by_age = self._parts.surplus_rule(surplus, policy_version=self._engine.policy_version)
        endings = self._take_out(context, by_age.old)
        self._ledger.waste(STALE, by_age.masked_tokens)
        context.surplus = by_age.fresh
        return endings

    def _take_out(self, context: StepContext, endings: Sequence[Ending]) -> list[Ending]:
        """Requeue what is to be answered again; return the other endings."""
        context.give_back([ending for ending in endings if isinstance(ending, Requeued)])
        return [ending for ending in endings if not isinstance(ending, Requeued)]

    @property
    def _keeps_partial(self) -> bool:
        return self._settings.mode is not RolloutMode.SYNC

    async def _watched(self, rollout_fn: RolloutFn, context: StepContext) -> object:
        """Call the rollout function; where nothing finishes for long, observers are told what it waits for."""

        def describe() -> str:
            phases = {i: each.phase for i, each in context.running.items() if not each.task.done()}
            return describe_phases(phases, num_at_engine=self._gate.num_at_engine)

        seconds = self._settings.watchdog_seconds
        watchdog = Watchdog(quiet_seconds=seconds, describe=describe, report=self._observers.waiting)
        with rare_collections():
            async with watchdog:
                self._observers.on_rollout = watchdog.sign_of_life
                with blaming(ROLLOUT_SETTING, rollout_fn):
                    return await rollout_fn(context)

    async def _stop(self, step: _Step) -> None:
        """End a step that will have no batch, and give its prompts back."""
        self._step = None
        step.task.cancel()
        await asyncio.gather(step.task, return_exceptions=True)
        await step.context.close()
        ended = {group.group_index: group for group in (*step.context.surplus, *(each.group for each in step.endings))}
        # What was surplus before the step stays so.
        rest = [group for index, group in ended.items() if self._ledger.place(index) is Place.IN_FLIGHT]
        step.context.requeue_rest(rest, keep_partial=self._keeps_partial)
        self._failures.settle(())
        self._surplus = tuple(
            group for group in self._surplus if self._ledger.place(group.group_index) is Place.SURPLUS
        )

    def _settle(self, step: _Step, cut: BatchCut) -> StepCommit:
        """Book all endings of a step whose batch has been cut, and return what is to be stored."""
        context, ledger = step.context, self._ledger
        ledger.waste(STALE, cut.masked_tokens)
        ended = sorted(self._take_out(context, step.endings), key=lambda ending: ending.group.group_index)
        new = [each.group for each in ended if ledger.place(each.group.group_index) is not Place.SURPLUS]
        for ending in ended:
            context.book(ending)
        context.requeue_rest(keep_partial=self._keeps_partial)
        self._supply.learn([group for group in new if group.is_finished])
        counts = ledger.counts()
        in_flight = tuple(running.rest() for running in self._in_flight.groups.values())
        assert counts.balanced, f"the ledger does not balance: {counts}"
        assert counts.in_flight == len(in_flight), f"{len(in_flight)} groups are in flight: {counts}"
        metrics = self._metrics(step, cut, counts)
        state = RunState(
            next_step=context.step + 1,
            next_group_index=self._supply.next_group_index,
            requeued=self._supply.requeued,
            surplus=tuple(each.group for each in ended if isinstance(each, Surplus)),
            in_flight=in_flight,
            ledger=counts,
            outcomes=self._failures.settle(
                [ending.group.group_index for ending in ended], in_flight=self._in_flight.groups
            ),
            **self._supply.learned(),
        )
        self._failures.report()
        return StepCommit(
            batch=replace(cut.batch, metrics=metrics),
            dropped=tuple(
                Dropped(each.group, FAILED_REASON) if isinstance(each, Failed) else each
                for each in ended
                if isinstance(each, Dropped | Failed)
            ),
            wasted_tokens=ledger.wasted_tokens(),
            state=state,
        )

    def _metrics(self, step: _Step, cut: BatchCut, counts: LedgerCounts) -> dict[str, float]:
        seconds, num_tokens = time.monotonic() - step.started, self._runner.num_generated_tokens - step.tokens_before
        return {
            **cut.batch.metrics,
            **self._ledger.step_metrics(),
            #: rollout/reward_timeout, rollout/reward_error: gradings that failed in the step
            **{f"rollout/reward_{name}": float(count) for name, count in self._runner.take_reward_failures().items()},
            **self._parts.reward_metrics(),
            **{f"ledger/{place}": float(count) for place, count in asdict(counts).items()},
            **{f"engine/{name}": value for name, value in self._engine.metrics().items()},
            **self._parts.publisher.metrics(),
            **self._supply.metrics(),
            #: rollout/generated_tokens: tokens sampled in the step, trained on or not
            "rollout/generated_tokens": float(num_tokens),
            #: perf/step_seconds: seconds from the beginning of the step to its end
            "perf/step_seconds": seconds,
            #: perf/tokens_per_second: tokens sampled by a second of the step
            "perf/tokens_per_second": num_tokens / seconds,
            **self.clock.take(cut.batch.groups),
        }

    async def _store(self, commit: StepCommit) -> None:
        """Store the step in a thread; a cancellation waits until it is stored or has failed."""
        if self._commit is None:
            return
        with self.clock.doing(Activity.STORE):
            await until_done(asyncio.create_task(asyncio.to_thread(self._commit, commit)))
