"""Prompts with their numbers: those that wait first, then new ones from the source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollfeed.errors import PluginError, RollfeedError
from rollfeed.faults import blaming, complaint, describe, is_own
from rollfeed.pipeline.ledger import Ledger
from rollfeed.pipeline.placement import Placement
from rollfeed.protocols import PromptBuffer, PromptSource
from rollfeed.types import Prompt, PromptDraw


def load_state(source: PromptSource, state: Mapping[str, Any]) -> None:
    """Take a source to where an earlier process left it.

    Raises:
        ConfigError: If it does not go there.
    """
    try:
        source.load_state_dict(state)
    except RollfeedError:
        raise
    except Exception as error:
        raise PluginError(f"{_setting(source)}: load_state_dict: {describe(error, source)}") from error


def _setting(source: PromptSource) -> str:
    return "prompts" if is_own(source) else "plugins.prompt_source"


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
        """Return the next ``count`` prompts; fewer only when the source has ended.

        Raises:
            RunFailedError: If the source or the buffer's policy raises, or returns something else than it must.
        """
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

    def source_state(self) -> dict[str, Any]:
        """Return where the source is.

        Raises:
            RunFailedError: If it raises.
        """
        with blaming(_setting(self._source), self._source):
            return self._source.state_dict()

    def requeue(self, draws: Iterable[PromptDraw]) -> None:
        """Take prompts back; they are drawn again before new ones."""
        self._buffer.add(draws)

    async def _draw_new(self, count: int) -> list[PromptDraw]:
        with blaming(_setting(self._source), self._source):
            prompts = list(await self._source.draw(count))
        if len(prompts) > count or not all(isinstance(prompt, Prompt) for prompt in prompts):
            told = f"{len(prompts)} of {', '.join(sorted({type(prompt).__name__ for prompt in prompts}))}"
            raise complaint(_setting(self._source), self._source, f"returned {told}; {count} prompts were asked for")
        draws = []
        for prompt in prompts:
            draws.append(PromptDraw(self.next_group_index, prompt))
            self._ledger.draw(self.next_group_index)
            self.next_group_index += 1
        return draws
