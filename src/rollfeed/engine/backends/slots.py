"""Slots: one fixed stretch of keys and values a request, and what can be reused of them.

A slot remembers the tokens whose keys and values it holds, also after its request has ended. The
longest common prefix of a new prompt with any slot is copied instead of computed: samples of a
group share one prefill, a resumed request finds its own tokens again, and prompts that begin alike
share their beginning. What older weights computed is never shared.

Axes: N slots, C capacity of each in tokens.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_EMPTY = -1
_FEW_SLOTS = 8
"""Slots that are used in turn from the beginning, so that some conversations, one after the other, keep theirs."""


class KeyValueCache(Protocol):
    """The keys and values of all slots."""

    def copy_positions(self, donor: int, slot: int, start: int, end: int) -> None:
        """Give ``slot`` the donor's keys and values of positions ``start`` to ``end``."""

    def erase(self, slot: int) -> None:
        """Set a slot's keys and values to zero."""


class Slots:
    """Keys and values of N requests of at most C tokens each.

    Of a prompt's P tokens, P - 1 are computed ahead (*prefilled*); the last one goes through the
    ordinary decode step, so that requests with the same prompt can share everything before it.
    """

    def __init__(
        self, cache: KeyValueCache, *, num_slots: int, capacity: int, whole_prompts_only: bool = False
    ) -> None:
        """Keep the books of a cache.

        Args:
            cache: Holds the keys and values.
            num_slots: N.
            capacity: C.
            whole_prompts_only: Reuse a prefix only where a prefill of the very same prompt left it.
        """
        self._cache = cache
        self.num_slots = num_slots
        self.capacity = capacity
        self._whole_prompts_only = whole_prompts_only
        self._token_ids_NC: NDArray[np.int32] = np.full((num_slots, capacity), _EMPTY, np.int32)
        self._computed_N = np.zeros(num_slots, np.int64)
        self._prefill_N = np.zeros(num_slots, np.int64)
        self._shareable_N = np.zeros(num_slots, np.bool_)
        self._occupied_N = np.zeros(num_slots, np.bool_)
        self._released_N = np.zeros(num_slots, np.int64)
        """Which release was each slot's last one."""
        self._num_releases = 0
        self._num_used = min(num_slots, _FEW_SLOTS)
        """Slots that are used in turn: as many as have ever been occupied at once, since others take no memory yet."""

    def num_computed(self, slot: int) -> int:
        """Return how many tokens of the slot have keys and values."""
        return int(self._computed_N[slot])

    def has_free(self) -> bool:
        """Whether a request can be admitted."""
        return not self._occupied_N.all()

    def occupy(self, prompt_ids: NDArray[np.int32], *, reuse: bool = True) -> tuple[int, int]:
        """Take a free slot for a prompt; return it and how many prompt tokens it already holds.

        The lowest free slot that holds nothing, or else the one that was released first, except that a free slot of
        which the prompt repeats most is taken as it is. Without ``reuse`` every token is to be computed.
        """
        free = np.flatnonzero(~self._occupied_N)
        common_N = self._common_prefixes(prompt_ids)
        best = int(free[common_N[free].argmax()])
        if 2 * common_N[best] >= self._computed_N[best] and common_N[best] > 0:
            slot = best
        else:
            in_turn = free[free < self._num_used] if free[0] < self._num_used else free[:1]
            holds = self._shareable_N[in_turn] & (self._computed_N[in_turn] > 0)
            slot = int(in_turn[np.where(holds, self._released_N[in_turn], _EMPTY).argmin()])
        self._num_used = max(self._num_used, slot + 1)
        kept = int(common_N[slot]) if reuse else 0
        self._token_ids_NC[slot, : len(prompt_ids)] = prompt_ids
        self._computed_N[slot] = kept
        self._prefill_N[slot] = len(prompt_ids) - 1
        self._shareable_N[slot] = True
        self._occupied_N[slot] = True
        return slot, kept

    def release(self, slot: int) -> None:
        """Free a slot; what it holds stays usable as a prefix until the slot is taken."""
        self._occupied_N[slot] = False
        self._num_releases += 1
        self._released_N[slot] = self._num_releases

    def erase(self, slot: int) -> None:
        """Free a slot whose keys and values are not numbers any more."""
        self._cache.erase(slot)
        self._computed_N[slot] = 0
        self._shareable_N[slot] = False
        self._occupied_N[slot] = False

    def copy_longest_prefix(self, slot: int) -> int:
        """Copy to a slot what another one holds of its prompt; return how many tokens that saved."""
        computed = self.num_computed(slot)
        prompt_ids = self._token_ids_NC[slot, : self._prefill_N[slot] + 1]
        common_N = self._common_prefixes(prompt_ids)
        common_N[slot] = 0
        donor = int(common_N.argmax())
        length = int(common_N[donor])
        if length <= computed:
            return 0
        self._cache.copy_positions(donor, slot, computed, length)
        self._computed_N[slot] = length
        return length - computed

    def prefill_remaining(self, slot: int) -> int:
        """Return how many prompt tokens are still to be prefilled."""
        return int(self._prefill_N[slot] - self._computed_N[slot])

    def shares_unfinished_prefill(self, slot: int, earlier: int) -> bool:
        """Whether ``earlier`` is about to compute prompt tokens that ``slot`` needs too."""
        length = int(min(self._prefill_N[slot], self._prefill_N[earlier]))
        equal = self._token_ids_NC[slot, :length] == self._token_ids_NC[earlier, :length]
        if self._whole_prompts_only:
            return bool(self._prefill_N[slot] == self._prefill_N[earlier] and equal.all())
        return _leading_true(equal) > self.num_computed(slot)

    def token_ids(self, slot: int, start: int, end: int) -> NDArray[np.int32]:
        """Return the ids at positions ``start`` to ``end``, a view."""
        return self._token_ids_NC[slot, start:end]

    def append(self, slot: int, position: int, token_id: int) -> None:
        """Put a sampled token behind the others; its keys and values come with the next step."""
        self._token_ids_NC[slot, position] = token_id

    def advance(self, slot: int, count: int) -> None:
        """Note that the keys and values of the next ``count`` tokens have been written."""
        self._computed_N[slot] += count

    def invalidate(self) -> None:
        """Stop sharing what the weights so far computed; slots that have decoded nothing yet start again."""
        undecoded_N = self._occupied_N & (self._computed_N <= self._prefill_N)
        self._computed_N[undecoded_N | ~self._occupied_N] = 0
        self._shareable_N[:] = undecoded_N

    def _common_prefixes(self, prompt_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return how many leading tokens of the prompt, its last one aside, each slot can give."""
        limit = len(prompt_ids) - 1
        equal_NP = self._token_ids_NC[:, :limit] == prompt_ids[:limit]
        # The first mismatch; a column of mismatches behind the end stands for none.
        ended_NP = np.concatenate([~equal_NP, np.ones((self.num_slots, 1), np.bool_)], axis=1)
        common_N: NDArray[np.int64] = np.minimum(ended_NP.argmax(axis=1), self._computed_N)
        common_N[~self._shareable_N] = 0
        if self._whole_prompts_only:
            common_N[(common_N < limit) | (self._prefill_N != limit)] = 0
        return common_N


def _leading_true(values: NDArray[np.bool_]) -> int:
    return len(values) if values.all() else int(values.argmin())
