"""The watchdog speaks of a step in which nothing ends, and of no other."""

import asyncio

from rollfeed.pipeline.watchdog import Watchdog, describe_phases
from rollfeed.testing import ScriptedEngine


async def test_a_sign_of_life_silences_it_and_quiet_makes_it_speak() -> None:
    loop, told = asyncio.get_running_loop(), []
    now = loop.time()
    loop.time = lambda: now  # its timer is called by hand below, with a clock that stands
    async with Watchdog(quiet_seconds=60, describe=lambda: "group 3", report=told.append) as watchdog:
        now += 59
        watchdog.sign_of_life()
        now += 59
        watchdog._look()
        assert told == []
        now += 1
        watchdog._look()
        assert told == ["nothing has finished for 60 s; waiting for group 3"]
        watchdog.sign_of_life()
        now += 30
        watchdog._look()
        assert len(told) == 1
    del loop.time


def test_the_oldest_group_is_named_with_its_phase() -> None:
    phases = {7: "generating", 3: "scoring", 9: "generating"}
    assert describe_phases(phases, num_at_engine=5) == (
        "3 groups (2 generating, 1 scoring), the oldest is group 3 (scoring); 5 requests are at the engine"
    )
    assert describe_phases({}, num_at_engine=0) == "the rollout function or the prompt source"


async def test_a_step_whose_rollouts_end_one_by_one_is_not_called_quiet(make_rollouts) -> None:
    loop, told = asyncio.get_running_loop(), []
    now = loop.time()

    def answer(request) -> str:
        nonlocal now
        now += 50  # each answer takes less than the watchdog waits, all of them much longer
        return "1"

    class Listener:
        def waiting(self, message: str) -> None:
            told.append(message)

        def __getattr__(self, name: str):
            return lambda *args: None

    loop.time = lambda: now
    async with make_rollouts(
        ScriptedEngine(answer=answer), watchdog_seconds=60, rollout_timeout_seconds=10_000, observers=[Listener()]
    ) as rollouts:
        batch = await rollouts.generate_batch()
    del loop.time
    assert len(batch.samples) == 8
    assert told == []
