import asyncio
import random
import threading

import pytest

from rollfeed.errors import RunFailedError
from rollfeed.protocols import Scorer
from rollfeed.testing import Fault, ListSource, ScriptedEngine, make_group
from rollfeed.types import Dropped, Ending, LedgerCounts, StepCommit, Trained, Verdict


async def test_nothing_is_left_running_after_a_step_is_cancelled_at_a_random_time(make_rollouts) -> None:
    for seed in range(20):
        engine = ScriptedEngine(random_order=seed, fault_of=lambda r: Fault.HANG if r.request_id[-1] == "7" else None)
        rollouts = make_rollouts(engine, over_sampling_factor=2.0)
        async with rollouts:
            making = asyncio.create_task(rollouts.generate_batch())
            for _ in range(random.Random(seed).randrange(60)):
                await asyncio.sleep(0)
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)
            load = await engine.load()
            assert (load.running, load.waiting) == (0, 0)
            assert rollouts.ledger.balanced
            assert rollouts.ledger.in_flight == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_rollout_function_that_cancels_itself_has_failed(make_rollouts) -> None:
    async def gives_up(context):
        raise asyncio.CancelledError

    async with make_rollouts(ScriptedEngine(), rollout_fn=gives_up) as rollouts:
        with pytest.raises(RunFailedError, match=r"plugins.rollout .*gives_up.*CancelledError"):
            await rollouts.generate_batch()


async def test_a_cancelled_step_can_be_made_again(make_rollouts) -> None:
    hanging = True
    engine = ScriptedEngine(fault_of=lambda r: Fault.HANG if hanging else None)
    async with make_rollouts(engine) as rollouts:
        making = asyncio.create_task(rollouts.generate_batch())
        async with asyncio.timeout(60):
            while not engine.requests:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        hanging = False
        batch = await rollouts.generate_batch()
    assert [group.group_index for group in batch.groups] == [0, 1, 2, 3]
    assert batch.step == 0


async def test_a_run_goes_on_from_the_state_of_a_commit_as_if_unbroken(make_rollouts) -> None:
    async def run(steps_before_break: int) -> list[list[str]]:
        commits: list[StepCommit] = []
        trained = []
        for _, steps in enumerate([steps_before_break, 6 - steps_before_break]):
            source = ListSource([f"prompt {n}" for n in range(100)])
            async with make_rollouts(
                ScriptedEngine(random_order=1),
                source=source,
                state=commits[-1].state if commits else None,
                commit=commits.append,
                deterministic=True,
                over_sampling_factor=2.0,
            ) as rollouts:
                for _ in range(steps):
                    batch = await rollouts.generate_batch()
                    trained.append([f"{g.prompt.prompt_id}:{[s.response for s in g.samples]}" for g in batch.groups])
        return trained

    unbroken = await run(6)
    for break_at in range(1, 6):
        assert await run(break_at) == unbroken


async def test_a_commit_that_fails_is_an_error_of_the_step(make_rollouts) -> None:
    def commit(commit: StepCommit) -> None:
        raise OSError("disk full")

    async with make_rollouts(ScriptedEngine(), commit=commit) as rollouts:
        with pytest.raises(OSError, match="disk full"):
            await rollouts.generate_batch()


async def test_a_cancellation_waits_for_the_commit_that_is_being_written(make_rollouts) -> None:
    entered, release, written = threading.Event(), threading.Event(), []

    def commit(commit: StepCommit) -> None:
        entered.set()
        release.wait()
        written.append(commit.batch.step)

    async with make_rollouts(ScriptedEngine(), commit=commit) as rollouts:
        making = asyncio.create_task(rollouts.generate_batch())
        await asyncio.to_thread(entered.wait)
        making.cancel()
        await asyncio.sleep(0)
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await making
    assert written == [0]


async def test_a_custom_rollout_function_may_leave_prompts_to_be_requeued(make_rollouts) -> None:
    async def first_of_six(context) -> list[Ending]:
        drawn = await context.draw(6)
        return [Trained(group) for group in await asyncio.gather(*map(context.submit, drawn[:4]))]

    async with make_rollouts(ScriptedEngine(), rollout_fn=first_of_six) as rollouts:
        await rollouts.generate_batch()
        assert rollouts.ledger == LedgerCounts(drawn=6, trained=4, requeued=2)


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda groups: list(map(Trained, groups[:3])), "returned 3 groups; a batch has 4"),
        (lambda groups: list(map(Trained, (*groups[:3], groups[0]))), "returned group 0 2 times"),
        (lambda groups: [*map(Trained, groups), Dropped(groups[0], "x")], "returned group 0 2 times"),
        (lambda groups: list(groups), "must return a list of endings"),
        (lambda groups: [*map(Trained, groups[:3]), Trained(make_group([1.0], group_index=9))], "which is not of this"),
    ],
)
async def test_a_rollout_function_cannot_lose_or_double_a_group(make_rollouts, tamper, message) -> None:
    async def rollout(context) -> list[Ending]:
        return tamper(tuple(await asyncio.gather(*map(context.submit, await context.draw(4)))))

    async with make_rollouts(ScriptedEngine(), rollout_fn=rollout) as rollouts:
        with pytest.raises(RunFailedError, match=message):
            await rollouts.generate_batch()
        assert rollouts.ledger == LedgerCounts(drawn=4, requeued=4)


async def test_the_watchdog_says_what_a_quiet_step_waits_for(make_rollouts) -> None:
    told = asyncio.get_running_loop().create_future()

    class Listener:
        def waiting(self, message: str) -> None:
            if "8 requests" in message and not told.done():  # a pause before has a message of its own
                told.set_result(message)

        def __getattr__(self, name: str):
            return lambda *args: None

    engine = ScriptedEngine(fault_of=lambda r: Fault.HANG)
    async with make_rollouts(engine, watchdog_seconds=0.05, observers=[Listener()]) as rollouts:
        making = asyncio.create_task(rollouts.generate_batch())
        message = await asyncio.wait_for(told, 60)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
    assert "4 groups (4 generating), the oldest is group 0 (generating); 8 requests are at the engine" in message


async def test_no_request_reaches_the_engine_after_the_abort(make_rollouts) -> None:
    """R18: generate functions in the middle of their turns find the gate closed."""

    async def many_turns(request, *, services):
        samples = await services.default(request, services=services)
        for _ in range(request.group_index):
            samples = await services.default(request, services=services)
        return samples

    for seed in range(10):
        engine = ScriptedEngine(random_order=seed, max_running_requests=4)
        async with make_rollouts(engine, over_sampling_batch_size=20, generate_fn=many_turns) as rollouts:
            await rollouts.generate_batch()
            num_requests = len(engine.requests)
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(engine.requests) == num_requests


async def test_an_engine_that_refuses_to_abort_does_not_end_the_drain(make_rollouts) -> None:
    class Refusing(ScriptedEngine):
        async def abort(self, request_id: str | None = None) -> None:
            self.num_aborts += 1
            if self.num_aborts == 1:
                raise ConnectionError("refused")
            await super().abort(request_id)

    engine = Refusing(fault_of=lambda r: Fault.HANG if r.request_id == "step0-rollout0" else None)
    async with make_rollouts(engine, over_sampling_batch_size=5) as rollouts:
        await rollouts.generate_batch()
    assert engine.num_aborts >= 2


async def test_a_slow_reward_is_cancelled_after_the_grace_of_the_abort(make_rollouts) -> None:
    class Stuck(Scorer):
        async def score(self, rollouts, prompt):
            if prompt.prompt_id == "list/0@e0":
                await asyncio.Event().wait()
            return [Verdict(reward=1.0) for _ in rollouts]

    async with make_rollouts(
        ScriptedEngine(), scorer=Stuck(), over_sampling_batch_size=5, abort_grace_seconds=0.3
    ) as rollouts:
        batch = await rollouts.generate_batch()
    assert [group.group_index for group in batch.groups] == [1, 2, 3, 4]
