"""The prefixes that an engine holds in its key-value memory: pages of tokens, the least recently used out first."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

_MIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93], np.uint64)
_RECORDED_PAGES = 1 << 16
"""Records of uses are cleared of what came again once they have so many pages more than four times those held."""


class PrefixCache:
    """Pages that are held by the hashes of the prefixes that they end.

    What holds of a page holds of all before it, to be held, to be in use and to be used later than others, so a lookup
    is a bisection and the end of a sequence always goes first.
    """

    def __init__(self, page_tokens: int = 1) -> None:
        self.page_tokens = page_tokens
        self._stamps: dict[int, int] = {}
        """When each page held was used last."""
        self._num_users: dict[int, int] = {}
        """Of the pages in use."""
        self._records: deque[tuple[int, NDArray[np.uint64]]] = deque()
        self._num_recorded = 0
        self._stamp = 0
        self.num_clears = 0
        """How often everything was forgotten."""

    @property
    def num_tokens(self) -> int:
        return len(self._stamps) * self.page_tokens

    @property
    def num_used_tokens(self) -> int:
        """Tokens in use, which cannot go."""
        return len(self._num_users) * self.page_tokens

    def keys_of(self, token_ids: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return the names of a sequence's whole pages, first to last."""
        positions = np.arange(len(token_ids), dtype=np.uint64)
        mixed = token_ids.astype(np.uint64) * _MIX[0] + positions * _MIX[3]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[1]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[2]
        return np.cumsum(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)[self.page_tokens - 1 :: self.page_tokens]

    def num_held(self, keys: NDArray[np.uint64]) -> int:
        """Return how many tokens at the sequence's beginning are held."""
        return _length_within(keys, self._stamps) * self.page_tokens

    def num_in_use(self, keys: NDArray[np.uint64]) -> int:
        """Return how many tokens at the sequence's beginning are in use."""
        return _length_within(keys, self._num_users) * self.page_tokens

    def use(self, keys: NDArray[np.uint64]) -> None:
        """Hold a sequence, and keep it until ``leave``."""
        self.hold(keys)
        for key in keys.tolist():
            self._num_users[key] = self._num_users.get(key, 0) + 1

    def leave(self, keys: NDArray[np.uint64], *, is_held_again: bool = False) -> None:
        """End a use; the sequence stays held until its room is needed.

        ``is_held_again`` says that a sequence which begins so is held next, which does the same.
        """
        for key in keys.tolist():
            left = self._num_users[key] - 1
            if left:
                self._num_users[key] = left
            else:
                del self._num_users[key]
        if not is_held_again and len(keys) and int(keys[0]) in self._stamps:
            self.hold(keys)

    def hold(self, keys: NDArray[np.uint64]) -> None:
        """Hold a sequence as the one used last."""
        self._stamp += 1
        self._stamps.update(dict.fromkeys(keys.tolist(), self._stamp))
        self._records.append((self._stamp, keys))
        self._num_recorded += len(keys)
        if self._num_recorded > 4 * len(self._stamps) + _RECORDED_PAGES:
            current = [(stamp, self._current(stamp, each)) for stamp, each in self._records]
            self._records = deque(record for record in current if len(record[1]))
            self._num_recorded = sum(len(each) for _, each in self._records)

    def shrink_to(self, num_tokens: int) -> None:
        """Let go what was not used for longest until no more than this is held, or all that is held is in use."""
        excess = len(self._stamps) - max(0, num_tokens) // self.page_tokens
        while excess > 0 and self._records:
            stamp, keys = self._records.popleft()
            self._num_recorded -= len(keys)
            current = self._current(stamp, keys)
            # Pages in use are recorded again when they are left.
            unused = current[_length_within(current, self._num_users) :]
            gone = unused[max(0, len(unused) - excess) :]
            for key in gone.tolist():
                del self._stamps[key]
            excess -= len(gone)
            if len(gone) < len(unused):
                self._records.appendleft((stamp, current[: len(current) - len(gone)]))
                self._num_recorded += len(current) - len(gone)

    def clear(self) -> None:
        """Forget everything; what is in use is not found any more."""
        self._stamps.clear()
        self._records.clear()
        self._num_recorded = 0
        self.num_clears += 1

    def _current(self, stamp: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return those pages of a record that have not been used since."""
        return keys[[self._stamps.get(key) == stamp for key in keys.tolist()]]


def _length_within(keys: NDArray[np.uint64], pages: dict[int, int]) -> int:
    """Return how many keys are there; those after the first that is not are not, either."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if int(keys[middle]) in pages:
            low = middle + 1
        else:
            high = middle
    return low
