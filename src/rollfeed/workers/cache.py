"""Results of calls that were made before."""

from __future__ import annotations

import hashlib
from collections import OrderedDict


class ResultCache:
    """The most recently used results by question, bounded in number and in bytes."""

    def __init__(self, *, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._results: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    @staticmethod
    def key(function_path: str, args_json: str) -> bytes:
        """Return what stands for a question, of one size whatever its length."""
        return hashlib.blake2b(f"{function_path}\n{args_json}".encode(), digest_size=20).digest()

    def get(self, key: bytes) -> str | None:
        """Return the result, or None where there is none."""
        if key not in self._results:
            return None
        self._results.move_to_end(key)
        return self._results[key]

    def put(self, key: bytes, result: str) -> None:
        """Keep a result; the longest unused ones make room for it."""
        self._num_bytes += len(result) - len(self._results.pop(key, ""))
        self._results[key] = result
        while self._results and (len(self._results) > self._max_entries or self._num_bytes > self._max_bytes):
            _, dropped = self._results.popitem(last=False)
            self._num_bytes -= len(dropped)
