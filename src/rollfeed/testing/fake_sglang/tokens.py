"""Tokens whose JSON is made once: replies are put together from slices of it.

A token costs about 40 bytes: its ``[logprob, id, null]``, its id and its text.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.testing.fake_sglang.settings import LONGEST_RESPONSE

END_ID = 2
"""The end-of-turn token of every fake response that stops."""
_END_LOGPROB = -0.010050326585769653
_MARK_BASE = 20_480
"""Above all ids of the pool; a first token ``_MARK_BASE + length`` says how long the response will be."""
_NUM_STARTS = 4_096
_STRIDE = 2_654_435_761
"""Spreads neighbouring lengths over the pool."""
_POOL_SIZE = 1 << 16
_FIRST_ID, _LAST_ID = 1_000, 20_000
_TEXT_BYTES = 2

Part: TypeAlias = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Output:
    """Tokens as pieces of JSON; each piece but the first starts a new token."""

    ids: Sequence[Part]
    """Comma-separated ids."""
    triples: Sequence[Part]
    """Comma-separated ``[logprob,id,null]``."""
    text: Sequence[Part]
    """The inside of a JSON string."""
    num_tokens: int


def explicit_output(token_ids: Sequence[int], logprobs: Sequence[float], text: str) -> Output:
    """Return given tokens as JSON."""
    triples = msgspec.json.encode([[logprob, token, None] for logprob, token in zip(logprobs, token_ids, strict=True)])
    ids = msgspec.json.encode(list(token_ids))
    return Output([ids[1:-1]], [triples[1:-1]], [msgspec.json.encode(text)[1:-1]], len(token_ids))


class TokenPool:
    """65,536 made-up tokens with log-probabilities, and their JSON; ids are below ``vocab_size`` if it is given."""

    def __init__(self, vocab_size: int | None = None) -> None:
        random = np.random.default_rng(0)
        first, last = (_FIRST_ID, _LAST_ID) if vocab_size is None else (1, vocab_size)
        self.token_ids: NDArray[np.int32] = random.integers(first, last, _POOL_SIZE).astype(np.int32)
        self.logprobs: NDArray[np.float32] = (-random.exponential(0.8, _POOL_SIZE)).astype(np.float32)
        ids = [b"%d," % token for token in self.token_ids.tolist()]
        triples = [
            b"[%s,%d,null]," % (repr(logprob).encode(), token)
            for logprob, token in zip(self.logprobs.tolist(), self.token_ids.tolist(), strict=True)
        ]
        letters = random.integers(ord("a"), ord("z") + 1, (_POOL_SIZE, _TEXT_BYTES), dtype=np.uint8)
        letters[:, 0] = np.where(random.random(_POOL_SIZE) < 0.4, ord(" "), letters[:, 0])
        self._ids, self._id_ends = _joined(ids)
        self._triples, self._triple_ends = _joined(triples)
        self._text = memoryview(letters.tobytes())

    def output(self, start: int, num_tokens: int, *, first: Output | None = None, ended: bool = False) -> Output:
        """Return tokens of the pool from ``start`` on, round and round.

        ``first`` are tokens before them; ``ended`` lets the end-of-turn token follow.
        """
        ids: list[Part] = []
        triples: list[Part] = []
        text: list[Part] = []
        extra = [first] if first is not None and first.num_tokens else []
        position, left = start % _POOL_SIZE, num_tokens
        while left > 0:
            end = min(_POOL_SIZE, position + left)
            ids += [self._ids[self._id_ends[position] : self._id_ends[end] - 1], b","]
            triples += [self._triples[self._triple_ends[position] : self._triple_ends[end] - 1], b","]
            text.append(self._text[_TEXT_BYTES * position : _TEXT_BYTES * end])
            left -= end - position
            position = 0
        for each in extra:
            ids = [*each.ids, b",", *ids]
            triples = [*each.triples, b",", *triples]
            text = [*each.text, *text]
        if ended:
            ids += [b"%d" % END_ID, b","]
            triples += [b"[%s,%d,null]" % (repr(_END_LOGPROB).encode(), END_ID), b","]
        return Output(ids[:-1], triples[:-1], text, num_tokens + sum(each.num_tokens for each in extra) + ended)


@functools.cache
def token_pool(vocab_size: int | None = None) -> TokenPool:
    """Return the pool, the same in every process."""
    return TokenPool(vocab_size)


@dataclass(frozen=True, slots=True)
class Response:
    """A response of known length: a mark, tokens of the pool, and the end-of-turn token."""

    length: int
    """Tokens, mark and end included; at least 1."""
    start: int

    @classmethod
    def of(cls, length: int) -> Response:
        """Return the response of a length."""
        return cls(length, length * _STRIDE % _NUM_STARTS)

    def output(self, start: int, end: int) -> Output:
        """Return its tokens from ``start`` to ``end`` (exclusive)."""
        first = None
        if start == 0 and end > 0 and self.length > 1:
            first = explicit_output([_MARK_BASE + self.length], [-0.5], "a")
        ended = end == self.length and start < end
        # The mark takes the place before the pool's first token.
        num_pool = max(0, end - ended - max(start, 1))
        return token_pool().output(self.start + max(start, 1) - 1, num_pool, first=first, ended=ended)


def find_response(token_ids: NDArray[np.int32]) -> tuple[Response, int] | None:
    """Return the unfinished response that a prompt ends with, and how many of its tokens are there.

    So a request that goes on with what an engine sampled before gets the rest of the same response,
    from whichever engine is asked.
    """
    pool = token_pool().token_ids
    positions = np.flatnonzero((token_ids > _MARK_BASE) & (token_ids <= _MARK_BASE + LONGEST_RESPONSE))
    for position in positions[::-1].tolist():
        response = Response.of(int(token_ids[position]) - _MARK_BASE)
        made = token_ids[position + 1 :]
        if len(made) + 1 >= response.length:
            continue
        expected = pool[response.start : response.start + len(made)]
        if not len(made) or (made[0] == expected[0] and np.array_equal(made, expected)):
            return response, len(made) + 1
    return None


def _joined(pieces: Sequence[bytes]) -> tuple[memoryview, list[int]]:
    ends = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
    return memoryview(b"".join(pieces)), ends.tolist()
