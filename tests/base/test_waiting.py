import asyncio
import gc
import threading

import pytest

from rollfeed.base.waiting import telling_of_waiting, until_done


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


async def tells(monkeypatch: pytest.MonkeyPatch, *, limit_seconds: float, num: int) -> list[str]:
    """What is told of a wait whose seconds pass at once."""
    told: list[str] = []
    slept: list[float] = []
    waited, sleep = asyncio.Event(), asyncio.sleep

    async def pass_seconds(seconds: float) -> None:
        slept.append(seconds)
        if len(told) == num:
            waited.set()
        await sleep(0 if len(told) < num else 3600)

    monkeypatch.setattr("rollfeed.base.waiting.asyncio.sleep", pass_seconds)
    async with telling_of_waiting(told.append, most_seconds=5.0, limit_seconds=limit_seconds, limit="it"):
        await waited.wait()
    assert [f"{sum(slept[: place + 1]):.0f} s of it = {limit_seconds:g}" for place in range(num)] == told
    return told


@pytest.mark.parametrize(
    ("limit_seconds", "first"),
    [(600.0, "5 s of it = 600"), (12.0, "3 s of it = 12"), (0.5, "1 s of it = 0.5")],
)
async def test_a_wait_is_told_after_a_quarter_of_its_limit_and_then_at_twice_the_time(
    monkeypatch: pytest.MonkeyPatch, limit_seconds: float, first: str
) -> None:
    told = await tells(monkeypatch, limit_seconds=limit_seconds, num=4)
    seconds = [int(each.split()[0]) for each in told]
    assert told[0] == first
    assert seconds == [seconds[0] * 2**power for power in range(4)]


async def test_a_wait_that_is_over_is_told_no_more() -> None:
    tasks = asyncio.all_tasks()
    async with telling_of_waiting(lambda waited: None, most_seconds=5.0, limit_seconds=60.0, limit="it"):
        assert len(asyncio.all_tasks()) == len(tasks) + 1
    assert asyncio.all_tasks() == tasks
