"""Prompts with their numbers: requeued ones first, oldest first, then new ones from the source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollfeed.pipeline.ledger import Ledger
from rollfeed.protocols import PromptSource
from rollfeed.types import PromptDraw


class PromptSupply:
    """Numbers what the source hands out; a requeued prompt keeps its number."""

    def __init__(
        self, source: PromptSource, *, ledger: Ledger, next_group_index: int, requeued: Sequence[PromptDraw]
    ) -> None:
        self._source = source
        self._ledger = ledger
        self.next_group_index = next_group_index
        self._requeued = list(requeued)
        self.source_ended = False

    @property
    def requeued(self) -> tuple[PromptDraw, ...]:
        """Prompts that wait to be answered again, by group index."""
        return tuple(self._requeued)

    async def draw(self, count: int) -> list[PromptDraw]:
        """Return the next ``count`` prompts; fewer only when the source has ended."""
        draws, self._requeued = self._requeued[:count], self._requeued[count:]
        missing = count - len(draws)
        if missing:
            prompts = await self._source.draw(missing)
            self.source_ended = len(prompts) < missing
            for prompt in prompts:
                draws.append(PromptDraw(self.next_group_index, prompt))
                self._ledger.draw(self.next_group_index)
                self.next_group_index += 1
        return draws

    def requeue(self, draws: Iterable[PromptDraw]) -> None:
        """Take prompts back; they are drawn again before new ones."""
        self._requeued = sorted([*self._requeued, *draws], key=lambda draw: draw.group_index)
