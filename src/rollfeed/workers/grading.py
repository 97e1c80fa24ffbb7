"""Graders that run in the pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollfeed.errors import WorkerError, WorkerTimeoutError
from rollfeed.protocols import Workers
from rollfeed.types import Outcome, Verdict


class PooledGrader:
    """A grader whose every call runs in a worker process with a deadline.

    Args:
        workers: The pool.
        function_path: A function ``(response, label, metadata) -> Verdict``, by its dotted path.
        deadline_seconds: Of each call, from its turn; waiting for a turn does not count.
    """

    def __init__(self, *, workers: Workers, function_path: str, deadline_seconds: float) -> None:
        self._workers = workers
        self._function_path = function_path
        self._deadline_seconds = deadline_seconds

    async def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        """Return the grader's verdict; TIMEOUT or ERROR, with the cause, when it gave none."""
        try:
            result = await self._workers.call(
                self._function_path,
                [response, label, dict(metadata)],
                deadline_seconds=self._deadline_seconds,
                cached=True,
            )
        except WorkerTimeoutError as error:
            return Verdict(reward=None, outcome=Outcome.TIMEOUT, detail=str(error))
        except WorkerError as error:
            return Verdict(reward=None, outcome=Outcome.ERROR, detail=str(error))
        return to_verdict(result)


def to_verdict(result: Any) -> Verdict:
    """Return the verdict that crossed the process boundary as JSON values; anything else is an ERROR."""
    try:
        return msgspec.convert(result, type=Verdict)
    except (msgspec.ValidationError, ValueError) as error:
        detail = f"the grader returned {result!r:.80}, which is no verdict: {error}"
        return Verdict(reward=None, outcome=Outcome.ERROR, detail=detail)
