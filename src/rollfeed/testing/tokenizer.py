"""A tokenizer for tests: one id a character, exact both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.types import Message

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

    def decode(self, token_ids: Sequence[int] | NDArray[np.int32], *, skip_special_tokens: bool) -> str:
        """Return the characters; the end of the turn is left out when special tokens are."""
        return "".join(chr(token) for token in token_ids if not (skip_special_tokens and token == END_OF_TURN))

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        num_images: int = 0,
    ) -> str:
        """Return one line a message, and the assistant's opening."""
        del tools, template_kwargs, num_images
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "
