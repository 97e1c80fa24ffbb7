"""The tree against a list of all texts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfeed.routing import PrefixTree
from rollfeed.routing.prefix_tree import text_of

SERVERS = ("a", "b", "c")
TEXTS = st.lists(st.integers(0, 2), max_size=12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.sampled_from(SERVERS), TEXTS),
        st.tuples(st.just("forget"), st.sampled_from(SERVERS), st.just([])),
    ),
    max_size=40,
)


def text(token_ids: list[int]) -> bytes:
    return text_of(np.array(token_ids, np.int32))


def keep(tree: PrefixTree, token_ids: list[int], address: str) -> None:
    tree.keep(text(token_ids), tree.find(text(token_ids)), address)


def num_shared(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def num_prefixes(texts: list[list[int]]) -> int:
    return len({tuple(each[: at + 1]) for each in texts for at in range(len(each))})


def play(tree: PrefixTree, steps: list[tuple[str, str, list[int]]]) -> dict[str, list[list[int]]]:
    """Do all of it, and return the texts that each server was given since it was forgotten last."""
    given_texts: dict[str, list[list[int]]] = {address: [] for address in SERVERS}
    for act, address, token_ids in steps:
        if act == "keep":
            keep(tree, token_ids, address)
            given_texts[address].append(token_ids)
        else:
            tree.forget_server(address)
            given_texts[address] = []
    return given_texts


@given(STEPS, TEXTS)
def test_it_says_what_a_list_of_all_texts_says(steps: list[tuple[str, str, list[int]]], asked: list[int]) -> None:
    tree = PrefixTree(max_tokens=10_000, max_server_tokens=10_000)
    given_texts = play(tree, steps)
    match = tree.find(text(asked))
    expected = {
        address: most
        for address, texts in given_texts.items()
        if (most := max((num_shared(asked, each) for each in texts), default=0))
    }
    told = list(match.holders())
    assert dict(told) == expected
    assert [count for _, count in told] == sorted(expected.values(), reverse=True)
    assert {address: match.num_tokens_at(address) for address in expected} == expected
    assert tree.num_tokens == num_prefixes([each for texts in given_texts.values() for each in texts])
    assert all(tree.num_tokens_at(address) == num_prefixes(texts) for address, texts in given_texts.items())


@settings(max_examples=200)
@given(STEPS, TEXTS, st.integers(1, 20), st.integers(1, 12))
def test_bounds_hold_and_nothing_is_believed_that_was_not_kept(
    steps: list[tuple[str, str, list[int]]], asked: list[int], max_tokens: int, max_server_tokens: int
) -> None:
    tree = PrefixTree(max_tokens=max_tokens, max_server_tokens=max_server_tokens)
    given_texts: dict[str, list[list[int]]] = {address: [] for address in SERVERS}
    for step in steps:
        play(tree, [step])
        act, address, token_ids = step
        given_texts[address] = [*given_texts[address], token_ids] if act == "keep" else []
        assert tree.num_tokens <= max_tokens
        assert all(tree.num_tokens_at(each) <= max_server_tokens for each in SERVERS)
    for address, count in tree.find(text(asked)).holders():
        assert count <= max(num_shared(asked, each) for each in given_texts[address])
    for address in SERVERS:
        tree.forget_server(address)
    assert (tree.num_tokens, tree.num_nodes) == (0, 0)


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = PrefixTree(max_tokens=100, max_server_tokens=6)
    keep(tree, [1, 1, 2], "a")
    keep(tree, [1, 1, 3], "a")
    keep(tree, [1, 1, 2], "a")
    keep(tree, [4, 4, 4], "a")
    assert tree.find(text([1, 1, 3])).num_tokens_at("a") == 2
    assert tree.find(text([1, 1, 2])).num_tokens_at("a") == 3
    assert tree.find(text([4, 4, 4])).num_tokens_at("a") == 3


def test_a_cleared_tree_is_empty_and_can_be_used() -> None:
    tree = PrefixTree(max_tokens=100, max_server_tokens=100)
    keep(tree, [1, 2], "a")
    tree.clear()
    assert (tree.num_tokens, tree.num_nodes, list(tree.find(text([1, 2])).holders())) == (0, 0, [])
    keep(tree, [1, 2, 3], "b")
    assert list(tree.find(text([1, 2, 4])).holders()) == [("b", 2)]


def test_what_another_server_has_split_is_evicted_leaves_first_all_the_same() -> None:
    tree = PrefixTree(max_tokens=100, max_server_tokens=6)
    keep(tree, [1, 1, 2, 2], "b")
    keep(tree, [1, 1, 3], "b")
    keep(tree, [1, 1, 2, 5], "a")
    keep(tree, [9, 9, 9, 9], "b")
    assert tree.find(text([1, 1, 2, 2])).num_tokens_at("b") == 2
    assert tree.find(text([1, 1, 2, 5])).num_tokens_at("a") == 4
