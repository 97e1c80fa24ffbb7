"""A tokenizer for tests, one id a character and exact both ways, and a source of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.protocols import PromptSource
from rollfeed.types import Message, Prompt

END_OF_TURN = 3
"""The id that ends a response."""


class CharTokenizer:
    """Fits :class:`rollfeed.protocols.Tokenizer`; ids are code points, and 3 ends a turn."""

    eos_token_ids: tuple[int, ...] = (END_OF_TURN,)
    has_chat_template = True

    def encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        """Return one id a character."""
        del add_special_tokens  # there are none to add
        return np.array([ord(character) for character in text], np.int32)

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return one id a character."""
        starts = np.arange(len(text))
        return self.encode(text, add_special_tokens=False), np.stack([starts, starts + 1], axis=1)

    def decode(self, token_ids: Sequence[int] | NDArray[np.int32], *, skip_special_tokens: bool) -> str:
        """Return the characters; the end of the turn is left out when special tokens are."""
        ids = np.asarray(token_ids, "<i4")
        kept = ids[ids != END_OF_TURN] if skip_special_tokens else ids
        return kept.tobytes().decode("utf-32-le", errors="surrogatepass")

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        num_images: int = 0,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return one line a message, and the assistant's opening."""
        del tools, template_kwargs, num_images
        lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return lines + ("assistant: " if add_generation_prompt else "")


class ListSource(PromptSource):
    """Hands out a fixed list of texts, once, or for ever when ``repeat`` is set."""

    def __init__(self, texts: Sequence[str], *, labels: Sequence[Any] | None = None, repeat: bool = False) -> None:
        self._texts = list(texts)
        self._labels = list(labels) if labels is not None else [None] * len(texts)
        self._repeat = repeat
        self._next = 0

    async def draw(self, count: int) -> list[Prompt]:
        left = count if self._repeat else min(count, len(self._texts) - self._next)
        prompts = [self._prompt(self._next + offset) for offset in range(left)]
        self._next += left
        return prompts

    def state_dict(self) -> dict[str, Any]:
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
