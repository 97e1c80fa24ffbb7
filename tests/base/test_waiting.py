import asyncio
import gc
import threading
from typing import Any

import pytest

from rollfeed.base.waiting import Deadlines, telling_of_waiting, until_done
from rollfeed.testing.virtual_loop import run_in_virtual_time


async def test_what_a_task_returns_or_raises_is_what_it_gives() -> None:
    assert await until_done(asyncio.create_task(asyncio.to_thread(sum, [1, 2]))) == 3
    with pytest.raises(ZeroDivisionError):
        await until_done(asyncio.create_task(asyncio.to_thread(divmod, 1, 0)))


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_comes_when_the_thread_has_ended_and_nobody_complains(fails: bool) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(about))
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        released.wait()
        ended.set()
        if fails:
            raise ValueError("broken")

    waiting = asyncio.create_task(until_done(asyncio.create_task(asyncio.to_thread(work))))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize(
    ("limit_seconds", "first"),
    [(600.0, "5 s of it = 600"), (12.0, "3 s of it = 12"), (0.5, "1 s of it = 0.5")],
)
def test_a_wait_is_told_after_a_quarter_of_its_limit_and_then_at_twice_the_time(
    limit_seconds: float, first: str
) -> None:
    told: list[tuple[float, str]] = []

    async def wait() -> None:
        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            told.append((loop.time(), text))

        async with telling_of_waiting(tell, most_seconds=5.0, limit_seconds=limit_seconds, limit="it"):
            await asyncio.sleep(8.5 * int(first.split()[0]))

    run_in_virtual_time(wait())
    seconds = [int(text.split()[0]) for _, text in told]
    assert told[0][1] == first
    assert seconds == [seconds[0] * 2**power for power in range(4)]
    assert [text for _, text in told] == [f"{when:.0f} s of it = {limit_seconds:g}" for when, _ in told]


async def test_a_wait_that_is_over_is_told_no_more() -> None:
    tasks = asyncio.all_tasks()
    async with telling_of_waiting(lambda waited: None, most_seconds=5.0, limit_seconds=60.0, limit="it"):
        assert len(asyncio.all_tasks()) == len(tasks) + 1
    assert asyncio.all_tasks() == tasks


class Clocked:
    """Blocks under deadlines, in virtual time."""

    def __init__(self) -> None:
        self.deadlines = Deadlines()
        self.ended: dict[str, float] = {}

    async def work(self, name: str, *, limit: float, takes: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with self.deadlines.within(limit):
                await asyncio.sleep(takes)
        except TimeoutError:
            name += " too late"
        self.ended[name] = loop.time() - began


def test_blocks_end_within_a_second_of_their_deadline_and_those_that_are_left_do_not() -> None:
    clocked = Clocked()

    async def work() -> None:
        async with asyncio.TaskGroup() as tasks:
            for name, limit, takes in (("a", 60.0, 59.5), ("b", 60.2, 900.0), ("c", 60.2, 1.0), ("d", 5.0, 6.0)):
                tasks.create_task(clocked.work(name, limit=limit, takes=takes))
            await asyncio.sleep(0.5)
            tasks.create_task(clocked.work("e", limit=60.2, takes=900.0))

    run_in_virtual_time(work())
    assert clocked.ended.keys() == {"a", "b too late", "c", "d too late", "e too late"}
    assert clocked.ended["d too late"] == pytest.approx(5.0)
    assert all(60.2 <= clocked.ended[name] <= 61.2 for name in ("b too late", "e too late"))


def test_a_cancellation_in_a_block_with_a_deadline_is_one() -> None:
    async def work() -> str:
        task = asyncio.create_task(Clocked().work("a", limit=60.0, takes=900.0))
        await asyncio.sleep(1.0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return "cancelled"
        return "not"

    assert run_in_virtual_time(work()) == "cancelled"


def test_deadlines_that_nobody_waits_for_leave_no_timer() -> None:
    async def work() -> int:
        clocked = Clocked()
        await asyncio.gather(*(clocked.work(str(number), limit=60.0, takes=0.1) for number in range(1_000)))
        loop: Any = asyncio.get_running_loop()
        return sum(not timer.cancelled() for timer in loop._scheduled)

    assert run_in_virtual_time(work()) == 0
