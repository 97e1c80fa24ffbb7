"""Tokens of rendered conversations, of which long pieces come again: system messages, tools, what forks share."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from rollfeed.protocols import Tokenizer

_LONG_CHARACTERS = 1 << 11
"""Of pieces that are kept; shorter ones are tokenised as fast as they are found."""
_MOST_CHARACTERS = 1 << 26
"""Of all that are kept."""
_NUM_COMPARED = 3
"""Texts that are tokenised whole, too."""


class TextPieces:
    """Tokenises texts piece by piece, from each token that ends a turn to the next; long pieces once.

    Such tokens are found before a text is split into others, so that pieces do not depend on each other. That it is so
    is not believed: the first texts are tokenised whole, too, and where that differs, all are.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ends = [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.eos_token_ids]
        self._known: OrderedDict[str, NDArray[np.int32]] = OrderedDict()
        self._num_characters = 0
        self._num_compared = 0
        self._is_exact = True

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the tokens ``(N,)`` of rendered text."""
        end = next((end for end in self._ends if end and end in text), "") if self._is_exact else ""
        if not end or len(text) < _LONG_CHARACTERS:
            return self._whole(text)
        first, *others = text.split(end)
        token_ids = np.concatenate([self._piece(piece) for piece in (first, *(end + each for each in others))])
        if self._num_compared < _NUM_COMPARED:
            self._num_compared += 1
            whole = self._whole(text)
            self._is_exact = np.array_equal(whole, token_ids)
            return whole
        return token_ids

    def _piece(self, text: str) -> NDArray[np.int32]:
        if len(text) < _LONG_CHARACTERS:
            return self._whole(text)
        found = self._known.get(text)
        if found is not None:
            self._known.move_to_end(text)
            return found
        found = self._known[text] = self._whole(text)
        self._num_characters += len(text)
        while self._num_characters > _MOST_CHARACTERS:
            self._num_characters -= len(self._known.popitem(last=False)[0])
        return found

    def _whole(self, text: str) -> NDArray[np.int32]:
        return self._tokenizer.encode(text, add_special_tokens=False)
