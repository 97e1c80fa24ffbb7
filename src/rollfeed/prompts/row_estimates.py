"""Estimates of how often each row of a data set is solved, forgotten as the policy changes, in 8 bytes a row.

What was learned between two commits is a segment, a text that never changes: the state has all segments, and what
stores it writes each of them once. Two of them become one when they are about equally large, so that there are few.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HALF_LIFE = 100
"""Ages after which an answer counts half."""
_PRIOR = 0.5
"""Answers of each kind that an unknown row has: it is as likely always or never solved as not."""
_MOST_ROLLOUTS = 64
"""Of a group, that are looked at."""
_SHARPNESS = 2
_LEAST_CHANCE = 0.05

_KNOWN = np.dtype([("age", "<u4"), ("right", "<f2"), ("wrong", "<f2")])
_ENTRY = np.dtype([("row", "<u4"), *((name, _KNOWN[name]) for name in _KNOWN.names or ())])
_MOST_COUNTED = 30_000.0
"""Answers of a kind; more than this a number of two bytes may not hold."""


class RowEstimates:
    """Answers to each row that verdicts call right or wrong, the older the less they count.

    Age is counted in batches since which there are newer weights, as tokens tell.
    """

    def __init__(self, num_rows: int, *, group_size: int) -> None:
        self._known = np.zeros(num_rows, _KNOWN)
        self._group_size = min(max(group_size, 2), _MOST_ROLLOUTS)
        self._of_unknown = _spread(_PRIOR, _PRIOR, self._group_size)
        self._age = 0
        self._version = self._newest_version = -1
        self._changed: set[int] = set()
        """Rows that no segment has as they are now."""
        self._segments: list[str] = []
        """The largest first."""
        self.num_known = 0
        """Rows that have been answered."""

    def chance(self, row: int) -> float:
        """Return the chance that a row is to be drawn when its turn comes, at least 0.05.

        It is 1 for a row that nothing is known of; below that it goes by how likely a group of its answers has right
        and wrong ones, next to that of an unknown row, squared.
        """
        right, wrong = self._counts(row)
        spread = _spread(_PRIOR + right, _PRIOR + wrong, self._group_size)
        return max(_LEAST_CHANCE, min(1.0, spread / self._of_unknown) ** _SHARPNESS)

    def observe(self, row: int, judged: Sequence[bool], *, version: int) -> None:
        """Learn which answers to a row were right; ``version`` is the newest policy version of their tokens."""
        right, wrong = self._counts(row)
        self.num_known += not right + wrong
        right, wrong = right + sum(judged), wrong + len(judged) - sum(judged)
        self._known[row] = (self._age, min(right, _MOST_COUNTED), min(wrong, _MOST_COUNTED))
        self._changed.add(row)
        self._newest_version = max(self._newest_version, version)

    def end_step(self) -> None:
        """Get older if there were newer weights since the last call."""
        if self._newest_version > self._version:
            self._age += self._version >= 0
            self._version = self._newest_version

    def state_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        if self._changed:
            entries = np.empty(len(self._changed), _ENTRY)
            entries["row"] = sorted(self._changed)
            for name in _KNOWN.names or ():
                entries[name] = self._known[name][entries["row"]]
            self._changed.clear()
            while self._segments and len(self._segments[-1]) < 2 * len(_text(entries)):
                entries = _merged(_entries(self._segments.pop()), entries)
            self._segments.append(_text(entries))
        versions = [self._version, self._newest_version]
        return {"age": self._age, "versions": versions, "segments": list(self._segments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` returned for as many rows."""
        self._age, self._segments = state["age"], list(state["segments"])
        self._version, self._newest_version = state["versions"]
        self._known[:] = 0
        self._changed.clear()
        for entries in map(_entries, self._segments):
            for name in _KNOWN.names or ():
                self._known[name][entries["row"]] = entries[name]
        self.num_known = int(np.count_nonzero((self._known["right"] > 0) | (self._known["wrong"] > 0)))

    def _counts(self, row: int) -> tuple[float, float]:
        """Return right and wrong answers, each for as much as it counts now."""
        known = self._known[row]
        left = 0.5 ** ((self._age - int(known["age"])) / _HALF_LIFE)
        return left * float(known["right"]), left * float(known["wrong"])


def _spread(right: float, wrong: float, group_size: int) -> float:
    """Return the chance that a group has right and wrong answers, its accuracy Beta-distributed with these counts."""
    all_right = all_wrong = 1.0
    for number in range(group_size):
        all_right *= (right + number) / (right + wrong + number)
        all_wrong *= (wrong + number) / (right + wrong + number)
    return 1.0 - all_right - all_wrong


def _merged(older: NDArray[np.void], newer: NDArray[np.void]) -> NDArray[np.void]:
    """Return the entries of both by row, of a row that is in both the newer."""
    both = np.concatenate([newer, older])
    return both[np.unique(both["row"], return_index=True)[1]]


def _text(entries: NDArray[np.void]) -> str:
    return b64encode(entries.tobytes()).decode()


def _entries(segment: str) -> NDArray[np.void]:
    return np.frombuffer(b64decode(segment), _ENTRY)
