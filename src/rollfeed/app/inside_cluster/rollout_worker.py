"""A rollout worker: an engine, graders and group runner in a process of their own, for the process of a run.

Invariants: events are told in their order and each once; a turn that was written before an await of
:meth:`TurnJournal.flush` is in the run directory when that returns.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.app.build import Functions, group_plan, load_functions
from rollfeed.app.cluster.orders import (
    AbortRequests,
    AnswerGroup,
    CancelGroup,
    Event,
    GroupEnded,
    IsolationFound,
    JudgesAsked,
    KeptTurn,
    RolloutFailed,
    RolloutGenerated,
    TurnWritten,
    WorkerFacts,
    WorkerMetrics,
    pack,
    read_orders,
)
from rollfeed.app.inside_cluster.kept_output import KeptOutput
from rollfeed.app.model import Model, load_settings_model, run_engine
from rollfeed.cluster import Host, NodeNeeds
from rollfeed.cluster.node_checks import node_probe
from rollfeed.cluster.remote_workers import RemoteWorkers
from rollfeed.config import RunSpec
from rollfeed.errors import EngineUnavailableError, RollfeedError, RunFailedError, in_one_line
from rollfeed.pipeline import GroupPlan, Observers
from rollfeed.pipeline.groups import EngineGate, FailureBudget, GroupRunner
from rollfeed.protocols import Engine, Isolation, RolloutRequest, RunningGroup, TurnJournal
from rollfeed.store.codec import decode, encode
from rollfeed.types import Completion, EngineLoad, Group, Picture, Rollout, SamplingParams, Turn, WeightUpdate

_POLL_SECONDS = 5.0
_METRICS_SECONDS = 1.0

Tell = Callable[[Event], None]


class RolloutWorker:
    """Answers and scores groups as a run of ``spec`` does in one process; is called by that run's process.

    Args:
        spec: The run, with this worker's share of the engine.
        reward_hosts: Where calls of graders and environments are made; none are made here then.
    """

    def __init__(self, spec: RunSpec, reward_hosts: Sequence[Host] = ()) -> None:
        self._spec = spec
        self._reward_hosts = reward_hosts
        self._events: list[Event] = []
        """Those that may not have arrived yet."""
        self._num_taken = 0
        """Events that have arrived, in all."""
        self._told = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        """For so many events to have arrived."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._attempt_of: dict[int, int] = {}
        """The attempt of a group, by its index."""
        self._told_metrics = 0.0

    async def open(self, needs: NodeNeeds) -> WorkerFacts:
        """Make everything and start the engine.

        Raises:
            ConfigError: If something that the run needs is not on this node.
            EngineUnavailableError: If the engine does not start, or the node, which may have joined since the start,
                has another rollfeed.
        """
        if (problem := node_probe()(*needs)) is not None:
            raise EngineUnavailableError(f"node {socket.gethostname()} {problem}")
        settings, folders = self._spec.settings, self._spec.folders
        self._journal, self._output = _ToldJournal(self._tell_turn, self._all_taken), KeptOutput()
        async with AsyncExitStack() as entered:
            entered.enter_context(self._output.keeping())
            functions: Functions = await asyncio.to_thread(load_functions, settings, folders=folders)
            model: Model = await asyncio.to_thread(load_settings_model, settings)
            services = functions.services
            services.on_isolation, services.workers.output = self._tell_isolation, self._output.printed
            self._engine: Engine = await asyncio.to_thread(run_engine, model, settings, folders=folders)
            await entered.enter_async_context(services)
            self._judge_counts = services.judges.counts
            await entered.enter_async_context(self._engine)
            self._entered = entered.pop_all()
        plan = group_plan(settings, functions, self._engine, model.tokenizer, self._journal)
        if plan.teacher is not None:
            await self._entered.enter_async_context(plan.teacher)
        self._gate = EngineGate(self._engine, max_requests_in_flight=settings.rollout.max_requests_in_flight)
        plan = replace(plan, services=replace(plan.services, endpoint=self._gate))
        if self._reward_hosts:
            services.workers.elsewhere = RemoteWorkers(self._reward_hosts)
        if functions.slime is not None:
            functions.slime.services, functions.slime.tokenizer = plan.services, model.tokenizer
            functions.slime.context_length = plan.max_context_length
        self._plan: GroupPlan = plan
        self._failures = _ToldFailures(plan, self._tell_failure)
        observer = _ToldRollouts(self._tell_rollout)
        self._runner = GroupRunner(plan, gate=self._gate, failures=self._failures, observer=observer)
        engine = self._engine
        return WorkerFacts(engine.policy_version, engine.precision, engine.max_running_requests, engine.is_exact)

    async def take(self, packed: bytes) -> None:
        """Take orders, in their order."""
        for order in read_orders(packed):
            match order:
                case AnswerGroup():
                    self._gate.open()
                    task = asyncio.create_task(self._answer(order), name=f"attempt {order.attempt}")
                    self._tasks[order.attempt] = task
                    task.add_done_callback(partial(self._forget, order.attempt))
                case CancelGroup(attempt):
                    if attempt in self._tasks:
                        self._tasks[attempt].cancel()
                case AbortRequests(None):
                    self._gate.close()
                    await self._engine.abort()
                case AbortRequests(request_id):
                    await self._engine.abort(request_id)

    async def poll(self, num_taken: int) -> bytes:
        """Return the events after the first ``num_taken``, when there are some, or after a while without."""
        del self._events[: num_taken - self._num_taken]
        self._num_taken = num_taken
        for number, waiting in list(self._waiting.items()):
            if number <= num_taken and not waiting.done():
                waiting.set_result(None)
        if not self._events:
            self._told.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._told.wait()
        now = time.monotonic()
        if now - self._told_metrics > _METRICS_SECONDS:
            self._told_metrics = now
            self._events += [WorkerMetrics(dict(self._engine.metrics())), *self._output.take()]
        return pack(self._events)

    async def close(self) -> bytes:
        """End what runs, and the engine; return what has been printed and logged since the last events."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._entered.aclose()
        return pack(self._output.take())

    async def generate(
        self, token_ids: NDArray[np.int32], params: SamplingParams, request_id: str, images: Sequence[Picture]
    ) -> Completion:
        """Sample one response, as :meth:`rollfeed.protocols.TokenEndpoint.generate`."""
        return await self._engine.generate(token_ids, params, request_id=request_id, images=images)

    async def apply(self, update: WeightUpdate) -> None:
        """Take new weights, as :meth:`rollfeed.protocols.Engine.apply`."""
        await self._engine.apply(update)

    async def pause(self) -> None:
        """Stop decoding, as :meth:`rollfeed.protocols.Engine.pause`."""
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def score(self, texts: Sequence[NDArray[np.int32]]) -> Mapping[str, NDArray[np.float64]]:
        """Return what each server says of texts, as :meth:`rollfeed.protocols.Engine.score`."""
        return dict(await self._engine.score(texts))

    async def load(self) -> EngineLoad:
        return await self._engine.load()

    async def health(self) -> None:
        await self._engine.health()

    async def _answer(self, order: AnswerGroup) -> None:
        """Answer a group, and tell of its end."""
        attempt, group = order.attempt, decode(Group, order.group)
        index = group.group_index
        self._attempt_of[index] = attempt
        self._journal.know(index, order.turns)
        running = RunningGroup.of(
            group,
            n_samples_per_prompt=self._runner.n_samples_per_prompt,
            policy_version=self._gate.policy_version,
        )
        try:
            ended = await self._runner.run(running, step=order.step)
            event = GroupEnded(
                attempt,
                rollouts=[encode(rollout) for rollout in ended.rollouts],
                num_succeeded=self._failures.take(index),
                reward_failures=self._runner.take_reward_failures(),
            )
        except asyncio.CancelledError:
            event = GroupEnded(attempt, rollouts=[encode(rollout) for rollout in running.rest().rollouts])
        except RollfeedError as error:
            event = GroupEnded(attempt, error=(type(error).__name__, str(error)))
        except Exception as error:  # whatever it is, the run's process is told
            event = GroupEnded(attempt, error=(RunFailedError.__name__, in_one_line(error)))
        self._failures.take(index)
        self._attempt_of.pop(index, None)
        self._journal.forget(index, step=order.step)
        if self._judge_counts.has_asked:  # before the end of the group, so that its step has them
            self._tell(JudgesAsked(self._judge_counts.taken()))
        self._tell(event)

    def _forget(self, attempt: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(attempt, None)
        if task.cancelled():  # before it had begun
            self._tell(GroupEnded(attempt))

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        self._told.set()

    def _tell_rollout(self, rollout: Rollout) -> None:
        index, member = divmod(rollout.rollout_id, self._runner.n_samples_per_prompt)
        self._tell(RolloutGenerated(self._attempt_of[index], member, encode(rollout)))

    def _tell_failure(self, group_index: int, cause: str, where: str) -> None:
        self._tell(RolloutFailed(self._attempt_of[group_index], cause, where))

    def _tell_turn(self, request: RolloutRequest, turn: Turn) -> None:
        attempt = self._attempt_of[request.group_index]
        self._tell(TurnWritten(attempt, KeptTurn.of(request.rollout_id, turn)))

    def _tell_isolation(self, found: Isolation) -> None:
        self._tell(IsolationFound(found.level.value, found.network_cut, found.files_hidden, found.detail))

    async def _all_taken(self) -> None:
        """Return when the run's process has taken all events so far."""
        if not self._events:
            return
        number = self._num_taken + len(self._events)
        waiting = self._waiting.setdefault(number, asyncio.get_running_loop().create_future())
        try:
            await asyncio.shield(waiting)
        finally:
            if waiting.done():
                self._waiting.pop(number, None)


class _ToldRollouts(Observers):
    """Tells of rollouts that have ended."""

    def __init__(self, tell: Callable[[Rollout], None]) -> None:
        super().__init__()
        self._tell = tell

    def rollout_finished(self, rollout: Rollout) -> None:
        self._tell(rollout)


class _ToldFailures(FailureBudget):
    """Tells of failures at once, and counts what ended well until its group has ended; the run's process decides."""

    def __init__(self, plan: GroupPlan, tell: Callable[[int, str, str], None]) -> None:
        super().__init__(plan.settings)
        self._tell = tell
        self._num_succeeded: dict[int, int] = {}

    def succeed(self, group_index: int) -> None:
        self._num_succeeded[group_index] = self._num_succeeded.get(group_index, 0) + 1

    def fail(self, group_index: int, cause: str, *, where: str) -> None:
        self._tell(group_index, cause, where)

    def take(self, group_index: int) -> int:
        """Return how many rollouts of a group ended well since the last call."""
        return self._num_succeeded.pop(group_index, 0)


class _ToldJournal(TurnJournal):
    """Has the run's process keep turns."""

    def __init__(self, tell: Callable[[RolloutRequest, Turn], None], flushed: Callable[[], Any]) -> None:
        super().__init__()
        self._tell = tell
        self._flushed = flushed

    def know(self, group_index: int, turns: Sequence[KeptTurn]) -> None:
        """Take what earlier executions of a group did."""
        self._turns.pop(group_index, None)
        for each in turns:
            self._turns.setdefault(group_index, {}).setdefault(each.rollout_id, []).append(each.read())

    def write(self, request: RolloutRequest, turn: Turn) -> None:
        super().write(request, turn)
        self._tell(request, turn)

    async def flush(self) -> None:
        await self._flushed()
