import asyncio
import gc
import threading

import pytest

from rollfeed.base.waiting import until_done


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
