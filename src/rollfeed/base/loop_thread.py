"""An event loop in a thread of its own, for callers that are not async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines in a loop that goes on between the calls; the thread ends with the process at the latest.

    Where ``first``, which it runs at once, raises or is interrupted, there is none.
    """

    def __init__(self, name: str, first: Coroutine[Any, Any, Any] | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()
        try:
            if first is not None:
                self.call(first)
        except BaseException:
            self.close()
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what work returns; an interrupt, such as Ctrl-C, cancels it."""
        result = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return result.result()
        finally:
            result.cancel()

    def close(self) -> None:
        """Cancel what still runs, and end the thread when that has ended."""
        try:
            self.call(_end_others())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


async def _end_others() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        if not task.cancelling():  # by an interrupt: it is ending, which another would cut short
            task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
