import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollfeed.base.loop_thread import LoopThread


class Opened:
    """Takes a turn of the loop to end."""

    def __init__(self) -> None:
        self.begun, self.has_ended = threading.Event(), False

    async def wait(self) -> None:
        try:
            self.begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.has_ended = True


@contextmanager
def interrupted_when(begun: threading.Event) -> Iterator[None]:
    """Press Ctrl-C when something has begun."""
    this = threading.get_ident()

    def press() -> None:
        begun.wait()
        signal.pthread_kill(this, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()


def test_it_returns_what_work_returns_and_goes_on_between_the_calls() -> None:
    async def double(number: int) -> int:
        return 2 * number

    thread = LoopThread("loop")
    assert [thread.call(double(number)) for number in range(3)] == [0, 2, 4]
    thread.close()
    assert thread.loop.is_closed()


def test_work_that_is_interrupted_ends_before_the_loop_is_closed() -> None:
    opened, thread = Opened(), LoopThread("loop")
    with interrupted_when(opened.begun):
        thread.call(opened.wait())
    thread.close()
    assert opened.has_ended


def test_a_start_that_is_interrupted_is_undone() -> None:
    opened = Opened()
    with interrupted_when(opened.begun):
        LoopThread("started", opened.wait())
    assert opened.has_ended
    assert "started" not in [thread.name for thread in threading.enumerate()]
