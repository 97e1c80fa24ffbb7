"""Prompts with their numbers: those that wait first, then new ones from the source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollfeed.pipeline.ledger import Ledger
from rollfeed.pipeline.placement import Placement
from rollfeed.protocols import PromptBuffer, PromptSource
from rollfeed.types import PromptDraw


class PromptSupply:
    """Numbers what the source hands out; a prompt that is taken back keeps its number."""

    def __init__(
        self,
        source: PromptSource,
        *,
        ledger: Ledger,
        next_group_index: int,
        buffer: PromptBuffer,
        placement: Placement,
    ) -> None:
        self._source = source
        self._ledger = ledger
        self._buffer = buffer
        self._placement = placement
        self.next_group_index = next_group_index

    @property
    def requeued(self) -> Sequence[PromptDraw]:
        """Prompts that wait to be answered again or gone on with, by group index, as of now."""
        held = self._placement.held
        waiting = self._buffer.snapshot()
        return sorted([*waiting, *held], key=lambda draw: draw.group_index) if held else waiting

    async def draw(self, count: int, *, policy_version: int) -> list[PromptDraw]:
        """Return the next ``count`` prompts; fewer only when the source has ended."""
        draws = self._placement.tail(count)
        draws += self._buffer.take(count - len(draws), policy_version=policy_version)
        while len(draws) < count:
            new = await self._draw_new(count - len(draws))
            if not new:
                # What was held back is all there is.
                draws += self._placement.release(count - len(draws))
                break
            draws += self._placement.order(new)
        return draws

    def requeue(self, draws: Iterable[PromptDraw]) -> None:
        """Take prompts back; they are drawn again before new ones."""
        self._buffer.add(draws)

    async def _draw_new(self, count: int) -> list[PromptDraw]:
        draws = []
        for prompt in await self._source.draw(count):
            draws.append(PromptDraw(self.next_group_index, prompt))
            self._ledger.draw(self.next_group_index)
            self.next_group_index += 1
        return draws
