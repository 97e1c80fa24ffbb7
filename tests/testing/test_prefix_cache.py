"""The prefix cache of fake servers beside a plain one that looks at everything."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from rollfeed.testing.prefix_cache import PrefixCache


class PlainCache:
    """Holds prefixes themselves and searches all of them."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.uses: dict[tuple[int, ...], int] = {}
        self.users: list[tuple[int, ...]] = []
        self.time = 0

    def pages(self, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [tokens[:end] for end in range(self.page_tokens, len(tokens) + 1, self.page_tokens)]

    def hold(self, tokens: tuple[int, ...]) -> None:
        self.time += 1
        self.uses |= dict.fromkeys(self.pages(tokens), self.time)

    def leave(self, tokens: tuple[int, ...]) -> None:
        self.users.remove(tokens)
        if self.num_held(tokens):
            self.hold(tokens)

    def num_held(self, tokens: tuple[int, ...]) -> int:
        return sum(page in self.uses for page in self.pages(tokens)) * self.page_tokens

    def shrink_to(self, num_tokens: int) -> None:
        while len(self.uses) * self.page_tokens > num_tokens:
            in_use = {page for tokens in self.users for page in self.pages(tokens)}
            unused = [page for page in self.uses if page not in in_use]
            if not unused:
                return
            del self.uses[min(unused, key=lambda page: (self.uses[page], -len(page)))]


def ids(tokens: tuple[int, ...]) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


@pytest.mark.parametrize("page_tokens", [1, 3])
def test_it_holds_what_a_plain_one_holds(page_tokens: int) -> None:
    random = Random(page_tokens)
    ours, plain = PrefixCache(page_tokens), PlainCache(page_tokens)
    room = 40
    for _ in range(3000):
        tokens = tuple(random.choices((1, 2), k=random.randrange(16)))
        action = random.random()
        if action < 0.45:
            ours.use(ours.keys_of(ids(tokens)))
            plain.hold(tokens)
            plain.users.append(tokens)
        elif action < 0.9 and plain.users:
            tokens = random.choice(plain.users)
            ours.leave(ours.keys_of(ids(tokens)))
            plain.leave(tokens)
        elif action < 0.99:
            ours.hold(ours.keys_of(ids(tokens)))
            plain.hold(tokens)
        else:
            ours.clear()
            plain.uses.clear()
        ours.shrink_to(room)
        plain.shrink_to(room)
        assert ours.num_held(ours.keys_of(ids(tokens))) == plain.num_held(tokens)
        assert ours.num_tokens == len(plain.uses) * page_tokens
        in_use = {page for each in plain.users for page in plain.pages(each)}
        assert ours.num_used_tokens == len(in_use) * page_tokens


def test_records_of_uses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollfeed.testing.prefix_cache._RECORDED_PAGES", 100)
    cache = PrefixCache()
    old, again = (cache.keys_of(np.arange(start, start + 20, dtype=np.int32)) for start in (0, 50))
    cache.hold(old)
    for _ in range(100):
        cache.hold(again)
        assert cache._num_recorded <= 4 * 40 + 100
    cache.shrink_to(25)
    assert (cache.num_held(old), cache.num_held(again)) == (5, 20)


def test_order_matters() -> None:
    cache = PrefixCache()
    cache.hold(cache.keys_of(ids((1, 2, 3))))
    assert cache.num_held(cache.keys_of(ids((1, 3, 2)))) == 1
    assert cache.num_held(cache.keys_of(ids((2, 1, 3)))) == 0
