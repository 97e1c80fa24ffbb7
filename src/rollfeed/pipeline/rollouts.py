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

from rollfeed.config import RolloutMode
from rollfeed.errors import RunFailedError
from rollfeed.faults import blaming
from rollfeed.pipeline.collector import rare_collections
from rollfeed.pipeline.context import StepContext
from rollfeed.pipeline.groups.failures import FailureBudget
from rollfeed.pipeline.groups.gate import EngineGate
from rollfeed.pipeline.groups.group_runner import GroupPlan, GroupRunner
from rollfeed.pipeline.groups.in_flight import InFlight
from rollfeed.pipeline.ledger import Ledger, Place
from rollfeed.pipeline.observers import Observers
from rollfeed.pipeline.placement import Placement
from rollfeed.pipeline.settlement import (
    ROLLOUT_SETTING,
    book,
    dropped_groups,
    indices,
    joined,
    step_metrics,
    too_old,
    wasted_tokens,
)
from rollfeed.pipeline.supply import PromptSupply, load_state
from rollfeed.pipeline.watchdog import Watchdog, describe_phases
from rollfeed.pipeline.weight_follower import WeightFollower
from rollfeed.protocols import (
    AgeRule,
    BatchCutter,
    Engine,
    GenerateFn,
    GroupFilter,
    PromptBuffer,
    PromptSource,
    RolloutFn,
    SampleHook,
    Scorer,
    Tokenizer,
    WeightProof,
)
from rollfeed.types import (
    STALE,
    BatchCut,
    ByAge,
    DroppedGroup,
    Group,
    LedgerCounts,
    RolloutOutput,
    RunState,
    StepCommit,
    TrainBatch,
    WeightProbe,
)

EMPTY_STATE = RunState(next_step=0, next_group_index=0, source={})


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """The functions that make up a run, chosen or default."""

    generate_fn: GenerateFn
    default_generate_fn: GenerateFn
    rollout_fn: RolloutFn
    scorer: Scorer
    group_filter: GroupFilter
    cut_batch: BatchCutter
    surplus_rule: AgeRule
    """Which groups that were kept by earlier steps may still be used."""
    sample_hook: SampleHook | None
    buffer: PromptBuffer
    placement: Placement = field(default_factory=Placement)
    weights: WeightFollower | None = None
    proof: WeightProof | None = None


@dataclass(slots=True)
class _Making:
    """A step that is being made."""

    context: StepContext
    output: RolloutOutput
    """What the rollout function has given so far."""
    task: asyncio.Task[RolloutOutput]
    """Its present call."""
    started: float
    """By the monotonic clock."""
    tokens_before: int
    """Generated in the whole run."""


class Rollouts:
    """Makes batches, one at a time. Enter it with ``async with``; that starts the engine.

    In ``async`` mode the next step begins when a batch has been cut, and goes on while nobody waits for its batch.
    """

    def __init__(
        self,
        *,
        plan: GroupPlan,
        parts: RolloutParts,
        source: PromptSource,
        engine: Engine,
        tokenizer: Tokenizer,
        state: RunState | None,
        commit: Callable[[StepCommit], None] | None,
        observers: Observers,
        services: AbstractAsyncContextManager[object] | None = None,
    ) -> None:
        self._settings = settings = plan.settings
        self._services = services
        self._parts = parts
        self._source = source
        self._engine = engine
        self._commit = commit
        self._observers = observers
        self._state = state or EMPTY_STATE
        self._surplus = self._state.surplus
        if state is not None:
            load_state(source, state.source)
        # Nobody works any more on what was under way when the state was taken.
        requeued = sorted([*self._state.in_flight, *self._state.requeued], key=lambda draw: draw.group_index)
        self._ledger = Ledger(
            self._state.ledger,
            requeued=[draw.group_index for draw in requeued],
            surplus=[group.group_index for group in self._state.surplus],
        )
        parts.buffer.add(requeued)
        self._supply = PromptSupply(
            source,
            ledger=self._ledger,
            next_group_index=self._state.next_group_index,
            buffer=parts.buffer,
            placement=parts.placement,
        )
        self._in_flight = InFlight()
        self._making: _Making | None = None
        self._gate = EngineGate(engine, max_requests_in_flight=settings.max_requests_in_flight)
        self._failures = FailureBudget(settings, settled=self._state.outcomes)
        self._runner = GroupRunner(
            plan=plan,
            endpoint=self._gate,
            tokenizer=tokenizer,
            generate_fn=parts.generate_fn,
            default_generate_fn=parts.default_generate_fn,
            scorer=parts.scorer,
            sample_hook=parts.sample_hook,
            failures=self._failures,
            observer=observers,
        )

    async def __aenter__(self) -> Rollouts:
        async with AsyncExitStack() as entered:
            if self._services is not None:
                await entered.enter_async_context(self._services)
            await self._engine.__aenter__()
            entered.push_async_exit(self._engine.__aexit__)
            if self._parts.weights is not None:
                entered.push_async_callback(self._parts.weights.close)
                if self._settings.mode is RolloutMode.ASYNC:
                    self._parts.weights.start()
            self._entered = entered.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            if self._making is not None:
                await self._stop(self._making)
        finally:
            await self._entered.aclose()

    @property
    def next_step(self) -> int:
        """The number of the step that :meth:`generate_batch` makes next."""
        return self._state.next_step

    @property
    def ledger(self) -> LedgerCounts:
        """Where every prompt drawn so far is."""
        return self._ledger.counts()

    async def update_weights(
        self, tensors: Mapping[str, Any], *, policy_version: int, probe: WeightProbe | None = None
    ) -> None:
        """Hand the engine new weights, by Hugging Face parameter name; see :class:`rollfeed.protocols.Engine`.

        The engine has to say of the texts of ``probe`` what they say; raises EngineError where it does not.
        """
        await self._engine.update_weights(tensors, policy_version=policy_version)
        await self.prove_weights(probe)

    async def prove_weights(self, probe: WeightProbe | None) -> None:
        """Compare the engine's weights with the publisher's, see docs/weights.md; raises as :meth:`update_weights`."""
        if self._parts.proof is not None:
            await self._parts.proof.prove(probe, policy_version=self._engine.policy_version)

    async def generate_batch(self) -> TrainBatch:
        """Make, store and return the next batch.

        Raises:
            PromptsEndedError: If the source has ended and what is left fills no batch.
            RunFailedError: If the step cannot be completed; its prompts are requeued and nothing is stored.
                An error from storing it leaves the manager unusable: make a new one from the last stored state.
        """
        if self._parts.weights is not None:
            await self._parts.weights.before_step(self._state.next_step)
        making = self._making or self._begin()
        making.context.want()
        try:
            cut = await self._cut(making)
        except BaseException:
            await self._stop(making)
            raise
        if self._settings.mode is not RolloutMode.ASYNC:
            await making.context.close()
        commit = self._settle(making, cut)
        self._state, self._surplus, self._making = commit.state, commit.state.surplus, None
        if self._settings.mode is RolloutMode.ASYNC:
            self._making = self._begin()
        await self._store(commit)
        self._observers.step_finished(commit)
        return commit.batch

    def _begin(self) -> _Making:
        """Begin to make the next step."""
        self._observers.step_started(self._state.next_step)
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
        output = RolloutOutput(groups=(), dropped=self._offer_surplus(context, self._surplus))
        return _Making(context, output, self._call(context), time.monotonic(), self._runner.num_generated_tokens)

    async def _cut(self, making: _Making) -> BatchCut:
        """Call the rollout function until its groups are a batch that is new enough.

        Raises:
            RunFailedError: If two calls in a row add nothing that is, or too many prompts were drawn.
        """
        num_in_vain = 0
        while True:
            context, num_before = making.context, len(making.output.groups)
            returned = await making.task
            with blaming(ROLLOUT_SETTING, self._parts.rollout_fn):
                making.output = joined(making.output, returned, context, self._parts.rollout_fn)
            cut = self._parts.cut_batch(
                making.output.groups, step=context.step, policy_version=self._engine.policy_version
            )
            if isinstance(cut, BatchCut):
                return cut
            num_in_vain = 0 if len(cut.fresh) > num_before else num_in_vain + 1
            most = self._settings.max_draws_per_batch * self._settings.rollout_batch_size
            if num_in_vain == 2 or context.num_submitted >= most:
                raise RunFailedError(
                    too_old(context, cut, num_in_vain, self._engine.policy_version, self._settings.max_staleness)
                )
            await self._ask_again(making, cut)

    def _offer_surplus(self, context: StepContext, surplus: Sequence[Group]) -> tuple[DroppedGroup, ...]:
        """Offer a step what may still be trained on; return what is dropped."""
        by_age = self._parts.surplus_rule(surplus, policy_version=self._engine.policy_version)
        for group in by_age.requeued:
            context.requeue(group)
        context.wasted_tokens[STALE] += by_age.masked_tokens
        context.surplus = by_age.fresh
        return by_age.dropped

    async def _ask_again(self, making: _Making, cut: ByAge) -> None:
        """Keep what is new enough, and have what is missing made."""
        context, output = making.context, making.output
        if self._settings.mode is not RolloutMode.ASYNC:
            await context.close()
        named = indices(output)
        for group in cut.requeued:
            context.requeue(group)
        context.requeue_rest(named, keep_partial=self._keeps_partial)
        dropped = (*output.dropped, *cut.dropped, *self._offer_surplus(context, output.surplus))
        making.output = replace(output, groups=cut.fresh, dropped=dropped, surplus=())
        context.reopen(named, missing=self._settings.rollout_batch_size - len(cut.fresh))
        making.task = self._call(context)

    @property
    def _keeps_partial(self) -> bool:
        return self._settings.mode is not RolloutMode.SYNC

    def _call(self, context: StepContext) -> asyncio.Task[RolloutOutput]:
        return asyncio.create_task(self._make_step(context), name=f"step {context.step}")

    async def _make_step(self, context: StepContext) -> RolloutOutput:
        def describe() -> str:
            return describe_phases(self._runner.phases, num_at_engine=self._gate.num_at_engine)

        watchdog = Watchdog(
            quiet_seconds=self._settings.watchdog_seconds, describe=describe, report=self._observers.waiting
        )
        with rare_collections():
            async with watchdog:
                self._observers.on_rollout = watchdog.sign_of_life
                with blaming(ROLLOUT_SETTING, self._parts.rollout_fn):
                    return await self._parts.rollout_fn(context)

    async def _stop(self, making: _Making) -> None:
        """End a step that will have no batch, and give its prompts back."""
        self._making = None
        making.task.cancel()
        await asyncio.gather(making.task, return_exceptions=True)
        await making.context.close()
        making.context.requeue_rest((), keep_partial=self._keeps_partial)
        self._in_flight.clear()
        self._failures.settle(())
        self._surplus = tuple(
            group for group in self._surplus if self._ledger.place(group.group_index) is Place.SURPLUS
        )

    def _settle(self, making: _Making, cut: BatchCut) -> StepCommit:
        context, output, seconds = making.context, making.output, time.monotonic() - making.started
        context.wasted_tokens[STALE] += cut.masked_tokens
        book(output, context, ledger=self._ledger, in_flight=self._in_flight)
        context.requeue_rest(indices(output), keep_partial=self._keeps_partial)
        self._parts.placement.learn([*output.groups, *(dropped.group for dropped in output.dropped)])
        counts, in_flight = self._ledger.counts(), tuple(flight.draft.rest() for flight in self._in_flight)
        assert counts.balanced, f"the ledger does not balance: {counts}"
        assert counts.in_flight == len(in_flight), f"{len(in_flight)} prompts are under way: {counts}"
        num_tokens = self._runner.num_generated_tokens - making.tokens_before
        metrics = {
            **cut.batch.metrics,
            **step_metrics(output, context),
            **{f"rollout/reward_{name}": float(count) for name, count in self._runner.take_reward_failures().items()},
            **{f"ledger/{place}": float(count) for place, count in asdict(counts).items()},
            **{f"engine/{name}": value for name, value in self._engine.metrics().items()},
            **(self._parts.proof.metrics() if self._parts.proof is not None else {}),
            "rollout/generated_tokens": float(num_tokens),
            "perf/step_seconds": seconds,
            "perf/tokens_per_second": num_tokens / seconds,
        }
        state = RunState(
            next_step=context.step + 1,
            next_group_index=self._supply.next_group_index,
            source=self._supply.source_state(),
            requeued=self._supply.requeued,
            surplus=tuple(sorted(output.surplus, key=lambda group: group.group_index)),
            in_flight=in_flight,
            lengths=self._parts.placement.state_dict(),
            ledger=counts,
            outcomes=self._outcomes(context),
        )
        return StepCommit(
            batch=replace(cut.batch, metrics=metrics),
            dropped=dropped_groups(output),
            wasted_tokens=wasted_tokens(context),
            state=state,
        )

    def _outcomes(self, context: StepContext) -> tuple[bool, ...]:
        under_way = {flight.draft.draw.group_index for flight in self._in_flight}
        outcomes = self._failures.settle(context.draws.keys() - under_way, under_way=under_way)
        self._failures.report()
        return outcomes

    async def _store(self, commit: StepCommit) -> None:
        """Store the step in a thread; a cancellation waits until it is stored or has failed."""
        if self._commit is None:
            return
        storing = asyncio.create_task(asyncio.to_thread(self._commit, commit))
        try:
            await asyncio.shield(storing)
        except asyncio.CancelledError:
            await asyncio.wait([storing])
            storing.exception()  # read, so that asyncio does not complain of one that nobody has
            raise
