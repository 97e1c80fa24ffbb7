"""Prompt sources for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollfeed.protocols import PromptSource
from rollfeed.testing.tokenizer import CharTokenizer
from rollfeed.types import Prompt


class ListSource(PromptSource):
    """Hands out a fixed list of texts, once, or for ever when ``repeat`` is set."""

    def __init__(self, texts: Sequence[str], *, labels: Sequence[Any] | None = None, repeat: bool = False) -> None:
        self._texts = list(texts)
        self._labels = list(labels) if labels is not None else [None] * len(texts)
        self._repeat = repeat
        self._next = 0

    async def draw(self, count: int) -> list[Prompt]:
        """Return the next prompts, in order."""
        left = count if self._repeat else min(count, len(self._texts) - self._next)
        prompts = [self._prompt(self._next + offset) for offset in range(left)]
        self._next += left
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position."""
        self._next = state["next"]

    def _prompt(self, number: int) -> Prompt:
        epoch, row = divmod(number, len(self._texts))
        text = self._texts[row]
        return Prompt(
            prompt_id=f"list/{row}@e{epoch}",
            source="list",
            text=text,
            token_ids=CharTokenizer().encode(text, add_special_tokens=False),
            label=self._labels[row],
        )
