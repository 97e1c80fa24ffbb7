"""Work that must not run in this process, since it may take for ever or all memory: it goes to killable workers.

Graders say what they want called; who calls it is up to the application.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollfeed.base.importing import find_function
from rollfeed.errors import WorkerCallError, WorkerTimeoutError
from rollfeed.types import Verdict


@dataclass(frozen=True, slots=True)
class IsolatedCall:
    """The rest of a grading: a call to make in a worker, and what its result means.

    ``function_path`` and ``args`` alone determine the result, so equal calls may share one.
    """

    function_path: str
    """``package.module.function``."""
    args: tuple[Any, ...]
    """JSON values."""
    finish: Callable[[Any], Verdict]

    def run_here(self) -> Verdict:
        """Make the call in this thread, without a deadline."""
        return self.finish(find_function(self.function_path)(*self.args))


class InProcessWorkers:
    """Calls in threads of this process: for tests and tools. What overruns its deadline is left behind, not killed."""

    async def call(
        self, function_path: str, args: Sequence[Any], *, deadline_seconds: float, cached: bool = False
    ) -> Any:
        del cached  # nothing is kept
        try:
            async with asyncio.timeout(deadline_seconds):
                return await asyncio.to_thread(find_function(function_path), *args)
        except TimeoutError as error:
            raise WorkerTimeoutError(f"{function_path}: not done within {deadline_seconds:g} s") from error
        except Exception as error:
            raise WorkerCallError(f"{function_path}: {type(error).__name__}: {error}") from error
