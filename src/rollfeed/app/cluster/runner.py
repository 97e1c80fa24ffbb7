"""Groups that rollout workers answer and score, as if they were answered here.

Invariant: a group ends once, whatever becomes of workers; what a lost worker had finished of it is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

from rollfeed.app.cluster.orders import (
    AnswerGroup,
    CancelGroup,
    Event,
    GroupEnded,
    KeptTurn,
    RolloutFailed,
    RolloutGenerated,
    TurnWritten,
)
from rollfeed.app.cluster.worker_places import RolloutWorkers, WorkerPlace
from rollfeed.cluster import HostDiedError
from rollfeed.cluster.hosting import returned
from rollfeed.errors import RunFailedError
from rollfeed.pipeline.groups import Activity, GroupPlan, GroupRunner
from rollfeed.protocols import RolloutRequest, RunningGroup
from rollfeed.store.codec import decode, encode
from rollfeed.types import Group, Outcome, Rollout

_MOST_DEATHS = 5
"""Of workers in the middle of one group; then it is the group that kills them."""
_CANCEL_SECONDS = 5.0


class _Member(NamedTuple):
    """A rollout, as the turn journal asks for it."""

    group_index: int
    rollout_id: int


class RemoteRunner(GroupRunner):
    """Runs groups at rollout workers; any number of them at once."""

    def __init__(self, workers: RolloutWorkers, plan: GroupPlan, **others: Any) -> None:
        super().__init__(plan, **others)
        self._workers = workers
        workers.journal = self.journal

    async def run(self, running: RunningGroup, *, step: int, on_generated: Callable[[], None] | None = None) -> Group:
        """Have a worker finish and score a group, as :meth:`GroupRunner.run`; where it dies another one goes on.

        Raises:
            RunFailedError: If the failure budget is spent, or the group has ended too many workers.
            EngineUnavailableError: If no worker is left.
        """
        for _ in range(_MOST_DEATHS):
            place = await self._workers.pick()
            if self._gate.is_closed:  # perhaps since then; the worker would begin anew behind the abort
                return running.rest()
            try:
                with self._clock.doing(Activity.GENERATE):
                    return await self._run_at(place, running, step)
            except HostDiedError as error:
                died = error
                self._workers.num_run_again += 1
        raise RunFailedError(
            f"group {running.group.group_index}: {_MOST_DEATHS} rollout workers have died while they answered it, the "
            f"last one: {died}"
        )

    async def _run_at(self, place: WorkerPlace, running: RunningGroup, step: int) -> Group:
        number = self._workers.next_attempt()
        group = replace(running.group, rollouts=tuple(running.rollouts) if _has_samples(running) else ())
        attempt = _Attempt(running, self._tell)
        place.attempts[number] = attempt
        place.order(AnswerGroup(number, step, encode(group), self._turns(running)))
        try:
            ended = await attempt.ended
        except asyncio.CancelledError:
            # What the worker still does for it may not outlive the step.
            place.order(CancelGroup(number))
            attempt.ended = asyncio.get_running_loop().create_future()
            await asyncio.wait([attempt.ended], timeout=_CANCEL_SECONDS)
            if attempt.ended.done():
                attempt.ended.exception()  # looked at, so that asyncio does not complain
            raise
        finally:
            place.attempts.pop(number, None)
        if ended.error is not None:
            returned(ended.error)
        for _ in range(ended.num_succeeded):
            self._failures.succeed(running.group.group_index)
        for outcome, count in ended.reward_failures.items():
            self._reward_failures[Outcome(outcome)] += count
        running.rollouts[:] = [decode(Rollout, each) for each in ended.rollouts] or running.rollouts
        return replace(running.group, rollouts=tuple(running.rollouts))

    def _turns(self, running: RunningGroup) -> list[KeptTurn]:
        index = running.group.group_index
        return [
            KeptTurn.of(rollout.rollout_id, turn)
            for rollout in running.rollouts
            for turn in self.journal.turns(_as_request(index, rollout.rollout_id))
        ]

    def _tell(self, running: RunningGroup, event: Event) -> None:
        index = running.group.group_index
        match event:
            case RolloutGenerated(_, member, encoded):
                before, rollout = running.rollouts[member], decode(Rollout, encoded)
                running.rollouts[member] = rollout
                self.num_generated_tokens += max(0, rollout.response_tokens - before.response_tokens)
                self._observer.rollout_finished(rollout)
                if all(each.has_finished for each in running.rollouts):
                    running.phase = "scoring"
            case RolloutFailed(_, cause, where):
                self._failures.fail(index, cause, where=where)
            case TurnWritten(_, turn):
                self.journal.write(_as_request(index, turn.rollout_id), turn.read())


class _Attempt:
    """One execution of a group; ``ended`` gives its end."""

    def __init__(self, running: RunningGroup, tell: Callable[[RunningGroup, Event], None]) -> None:
        self.ended: asyncio.Future[GroupEnded] = asyncio.get_running_loop().create_future()
        self._running = running
        self._tell = tell

    def tell(self, event: Event) -> None:
        if self.ended.done():
            return
        if isinstance(event, GroupEnded):
            self.ended.set_result(event)
            return
        try:
            self._tell(self._running, event)
        except Exception as error:  # also of an observer; it is the group's, as in a run without a cluster
            self.ended.set_exception(error)

    def lose(self, error: HostDiedError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


def _has_samples(running: RunningGroup) -> bool:
    return any(rollout.samples for rollout in running.rollouts)


def _as_request(group_index: int, rollout_id: int) -> RolloutRequest:
    """Return what the journal looks at of a request."""
    return cast(RolloutRequest, _Member(group_index, rollout_id))
