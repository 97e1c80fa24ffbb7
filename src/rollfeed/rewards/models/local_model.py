"""A reward model that is loaded here: texts wait until the model has time, and go through it by length.

Invariants: every text ends with its logits or one reason; a text that breaks or outlasts its batch costs no other one
its score.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollfeed.config.reward_model import RewardModelSettings
from rollfeed.errors import WorkerCallError, WorkerError
from rollfeed.protocols import Workers
from rollfeed.rewards.calls import failure
from rollfeed.rewards.models.inputs import ScoredText
from rollfeed.types import Verdict

Logits = list[list[float]]
"""``(S, C)``: of every place, one of each label."""
_FUNCTIONS = "rollfeed.rewards.models.torch_process"


class LocalRewardModel:
    """Scores texts where ``workers`` call functions. Entered with ``async with``, which ends the waiting.

    Args:
        folder: Of the model.
        settings: Where and how it computes.
        workers: Make its calls; those of the process that has the model, one at a time.
        alone: Every text goes alone, so that its last bits depend on no other.
    """

    def __init__(self, folder: Path, settings: RewardModelSettings, *, workers: Workers, alone: bool) -> None:
        self._model = (str(folder), settings.device, settings.precision.value)
        self._settings = settings
        self._alone = alone
        self._workers = workers
        self._waiting: list[tuple[ScoredText, asyncio.Future[Logits | Verdict]]] = []
        self._computing: asyncio.Task[None] | None = None
        self.num_batches = 0
        """Passes through the model."""

    async def __aenter__(self) -> LocalRewardModel:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        if self._computing is not None:
            self._computing.cancel()
            await asyncio.gather(self._computing, return_exceptions=True)

    async def logits(self, text: ScoredText) -> Logits | Verdict:
        """Return the logits of a text at its places, or the failed verdict that says why there are none."""
        waiting: asyncio.Future[Logits | Verdict] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, waiting))
        if self._computing is None or self._computing.done():
            self._computing = asyncio.create_task(self._compute())
        return await waiting

    async def _compute(self) -> None:
        """Score what waits, batch by batch, until nothing does."""
        batch: list[tuple[ScoredText, asyncio.Future[Logits | Verdict]]] = []
        try:
            while self._waiting:
                await asyncio.sleep(0)  # whatever comes in the same turn of the loop comes along
                batch = self._next_batch()
                if not batch:
                    continue
                texts = [text for text, _ in batch]
                results: Sequence[Logits | Verdict] | Verdict = await self._try(texts)
                if isinstance(results, Verdict):
                    results = [await self._alone_again(text, results, num_texts=len(texts)) for text in texts]
                for (_, waiting), result in zip(batch, results, strict=True):
                    if not waiting.done():
                        waiting.set_result(result)
        finally:
            for _, waiting in (*batch, *self._waiting):
                waiting.cancel()

    def _next_batch(self) -> list[tuple[ScoredText, asyncio.Future[Logits | Verdict]]]:
        """Take the longest text that waits, and as many of the next longest as fit beside it."""
        waiting = [each for each in self._waiting if not each[1].done()]
        waiting.sort(key=lambda each: -len(each[0].token_ids))
        most = 1
        if waiting and not self._alone:
            most = max(1, self._settings.batch_tokens // len(waiting[0][0].token_ids))
        batch, self._waiting = waiting[:most], waiting[most:]
        return batch

    async def _alone_again(self, text: ScoredText, failed: Verdict, *, num_texts: int) -> Logits | Verdict:
        if num_texts == 1:
            return failed
        result = await self._try([text])
        return result if isinstance(result, Verdict) else result[0]

    async def _try(self, texts: Sequence[ScoredText]) -> list[Logits] | Verdict:
        self.num_batches += 1
        args: list[Any] = [
            *self._model,
            [list(each.token_ids) for each in texts],
            [list(each.places) for each in texts],
        ]
        settings = self._settings
        try:
            # Also after a process was killed: the next one has no model yet, and takes its time.
            await self._workers.call(f"{_FUNCTIONS}.load", self._model, deadline_seconds=settings.load_timeout_seconds)
            found: list[Logits] = await self._workers.call(
                f"{_FUNCTIONS}.score", args, deadline_seconds=settings.timeout_seconds
            )
        except (WorkerError, WorkerCallError) as error:
            return failure(error)
        return found
