"""Tokens that lie side by side and were sampled by one policy version, or by none, with the text that clients see.

Axis: N tokens of one run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PROMPT = -1
"""The version of tokens that nobody sampled."""
ASKED = 1
"""A mark: the text up to here has been asked about, so that what follows may be a reply."""
ENDED = 2
"""A mark: a reply ended here."""


class TokenRun(NamedTuple):
    """A run of tokens, as bytes, which take a third of the room of arrays.

    The text is the client's, who may not be shown every token: a token that ends no character of it has a width of 0.
    """

    ids: bytes
    """int32, ``(N,)``."""
    logprobs: bytes
    """float32, ``(N,)``; nothing for a prompt."""
    widths: bytes
    """Bytes of text that end with each token, ``(N,)``; uint32 where one is above 255, otherwise uint8."""
    text: bytes
    """UTF-8."""
    version: int
    """Of the policy that sampled it, or ``PROMPT``."""
    marks: int = 0
    """Of its end: ``ASKED`` and ``ENDED``."""
    num_shown: int | None = None
    """For the end of a reply that was not shown whole, such as a stop string: the bytes of its text that were."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4

    @property
    def num_bytes(self) -> int:
        return len(self.ids) + len(self.logprobs) + len(self.widths) + len(self.text)

    @property
    def first_text(self) -> bytes:
        """The least text that a client who goes on from this must have."""
        if self.num_shown is not None:
            return self.text[: self.num_shown]
        return self.text[: next((width for width in self._width_array().tolist() if width), 0)]

    def cut(self, num_tokens: int) -> tuple[TokenRun, TokenRun]:
        """Return the first tokens, which lose the marks, and the others."""
        size = len(self.widths) // self.num_tokens * num_tokens
        place = int(self._width_array()[:num_tokens].sum(dtype=np.int64))
        at = 4 * num_tokens
        first = TokenRun(self.ids[:at], self.logprobs[:at], self.widths[:size], self.text[:place], self.version)
        rest = (self.ids[at:], self.logprobs[at:], self.widths[size:], self.text[place:])
        return first, TokenRun(*rest, self.version, self.marks, self.num_shown)

    def num_whole_tokens(self, num_bytes: int, most: int) -> tuple[int, int]:
        """Return the most first tokens that end with a character within the first bytes, and the bytes they have."""
        widths = self._width_array()[:most]
        ends = widths.cumsum(dtype=np.int64)
        whole = np.flatnonzero((widths > 0) & (ends <= num_bytes))
        return (int(whole[-1]) + 1, int(ends[whole[-1]])) if len(whole) else (0, 0)

    def num_common_tokens(self, other: TokenRun) -> int:
        """Return how many first tokens, by which both can be cut, are the same in everything."""
        if self.version != other.version:
            return 0
        if self.num_shown is not None or other.num_shown is not None:
            return self.num_tokens if self[:4] == other[:4] and self.num_shown == other.num_shown else 0
        shorter = min(self.num_tokens, other.num_tokens)
        differ = self._id_array()[:shorter] != other._id_array()[:shorter]
        differ |= self._width_array()[:shorter] != other._width_array()[:shorter]
        if self.logprobs:
            differ |= (
                np.frombuffer(self.logprobs, np.uint32)[:shorter] != np.frombuffer(other.logprobs, np.uint32)[:shorter]
            )
        num_same = int(differ.argmax()) if differ.any() else shorter
        num_bytes = common_bytes(self.text, other.text)
        if num_same == shorter and int(self._width_array()[:shorter].sum(dtype=np.int64)) <= num_bytes:
            return shorter
        return self.num_whole_tokens(num_bytes, num_same)[0]

    def _id_array(self) -> NDArray[np.int32]:
        return np.frombuffer(self.ids, np.int32)

    def _width_array(self) -> NDArray[Any]:
        return np.frombuffer(self.widths, np.uint8 if 4 * len(self.widths) == len(self.ids) else np.uint32)


def packed_widths(widths_N: NDArray[np.int64]) -> bytes:
    """Return widths as :attr:`TokenRun.widths`."""
    return widths_N.astype(np.uint8 if widths_N.max(initial=0) < 256 else np.uint32).tobytes()


def common_bytes(one: bytes, other: bytes, start: int = 0) -> int:
    """Return how many bytes of the first begin the other, which is read from ``start``."""
    size = min(len(one), len(other) - start)
    differ = np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size, start) if size else np.empty(0)
    return int(differ.argmax()) if differ.any() else size
