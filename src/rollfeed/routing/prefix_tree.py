"""A radix tree over token ids that knows which servers have computed which prefixes.

Edges are runs of tokens, as bytes of their int32 ids. Invariants: a server that holds a node holds all nodes above it,
and a node that nobody holds is not in the tree. What is in it is a belief: a server may have evicted more or less.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_ID_BYTES = 4
_LONGEST_EDGE_BYTES = 4096 * _ID_BYTES
"""Of an edge that grows; what comes behind it is evicted on its own."""


class _Node:
    __slots__ = ("children", "holders", "parent", "text")

    def __init__(self, text: bytes, parent: _Node | None) -> None:
        self.text = text
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        """By the first id of their edges."""
        self.holders: dict[str, int] = {}
        """Who has computed it, and how many of its children each of them holds."""


class PrefixMatch(NamedTuple):
    """The known part of a text; good until the tree is changed."""

    nodes: list[_Node]
    """From the root's child on; of the last one a part may be known only."""
    num_bytes: int
    """Of the text that are known."""
    last_bytes: int
    """Of the last node's edge that are known."""

    def holders(self, among: Collection[str] | None = None) -> Iterator[tuple[str, int]]:
        """Yield each server that has a prefix of the text, with its tokens, the longest prefix first.

        Of prefixes that more servers have than there are in ``among`` only those are.
        """
        end, known = self.num_bytes, self.last_bytes
        seen: set[str] = set()
        for node in reversed(self.nodes):
            holders = node.holders
            if len(holders) > len(seen):
                is_wide = among is not None and len(holders) > len(among)
                for address in [each for each in among or () if each in holders] if is_wide else holders:
                    if address not in seen:
                        seen.add(address)
                        yield address, end // _ID_BYTES
            end -= known
            known = len(node.parent.text) if node.parent is not None else 0

    def num_tokens_at(self, address: str) -> int:
        """Return how many tokens of the text a server is believed to have."""
        end, known = self.num_bytes, self.last_bytes
        for node in reversed(self.nodes):
            if address in node.holders:
                return end // _ID_BYTES
            end -= known
            known = len(node.parent.text) if node.parent is not None else 0
        return 0


class PrefixTree:
    """Texts that servers have computed, the least recently used ones forgotten first, a leaf at a time."""

    def __init__(self, *, max_tokens: int, max_server_tokens: int) -> None:
        """Make an empty tree.

        Args:
            max_tokens: Tokens that the tree may have; a prefix that several servers hold counts once.
            max_server_tokens: Tokens that one server is believed to keep.
        """
        self._max_bytes = max_tokens * _ID_BYTES
        self._max_server_bytes = max_server_tokens * _ID_BYTES
        self._root = _Node(b"", None)
        self._num_bytes = 0
        self._order: OrderedDict[_Node, None] = OrderedDict()
        """All nodes, the least recently used one first, and those above a node after it but for where one was split."""
        self._held: dict[str, OrderedDict[_Node, None]] = {}
        """The same of each server."""
        self._held_bytes: dict[str, int] = {}

    @property
    def num_tokens(self) -> int:
        return self._num_bytes // _ID_BYTES

    @property
    def num_nodes(self) -> int:
        """Edges in the tree."""
        return len(self._order)

    def num_tokens_at(self, address: str) -> int:
        """Return how many tokens a server is believed to keep."""
        return self._held_bytes.get(address, 0) // _ID_BYTES

    def find(self, text: bytes) -> PrefixMatch:
        """Return what is known of a text: token ids as int32 bytes (:func:`text_of`)."""
        node, at, known = self._root, 0, 0
        nodes: list[_Node] = []
        while (child := node.children.get(text[at : at + _ID_BYTES])) is not None:
            edge = child.text
            nodes.append(child)
            if not text.startswith(edge, at):
                known = _num_equal(edge, text, at)
                return PrefixMatch(nodes, at + known, known)
            known = len(edge)
            at += known
            node = child
        return PrefixMatch(nodes, at, known)

    def keep(self, text: bytes, match: PrefixMatch, address: str) -> None:
        """Note that a server has a text; ``match`` is what :meth:`find` has just said of it."""
        nodes = match.nodes
        if nodes and match.last_bytes < len(nodes[-1].text):
            nodes[-1] = self._split(nodes[-1], match.last_bytes)
        held = self._held.get(address)
        if held is None:
            held = self._held[address] = OrderedDict()
            self._held_bytes[address] = 0
        for node in nodes:
            if address not in node.holders:
                self._hold(node, address, held)
        if match.num_bytes < len(text):
            self._append(text[match.num_bytes :], nodes, address, held)
        order = self._order
        for node in reversed(nodes):
            held.move_to_end(node)
            order.move_to_end(node)
        self._shrink(address, held)

    def forget_server(self, address: str) -> None:
        """Believe that a server has nothing."""
        for node in self._held.pop(address, ()):
            del node.holders[address]
            if not node.holders:
                self._remove(node)
        self._held_bytes.pop(address, None)

    def clear(self) -> None:
        """Forget everything."""
        for node in self._order:
            node.parent = None  # without circles the nodes go at once
        self._root.children.clear()
        self._order.clear()
        self._held.clear()
        self._held_bytes.clear()
        self._num_bytes = 0

    def _hold(self, node: _Node, address: str, held: OrderedDict[_Node, None]) -> None:
        node.holders[address] = 0
        held[node] = None
        self._held_bytes[address] += len(node.text)
        if node.parent is not None and node.parent is not self._root:
            node.parent.holders[address] += 1

    def _append(self, rest: bytes, nodes: list[_Node], address: str, held: OrderedDict[_Node, None]) -> None:
        """Put the unknown rest of a text below the last of its nodes, or at the end of that one's edge."""
        last = nodes[-1] if nodes else self._root
        self._num_bytes += len(rest)
        if nodes and not last.children and len(last.holders) == 1 and len(last.text) + len(rest) <= _LONGEST_EDGE_BYTES:
            last.text += rest
            self._held_bytes[address] += len(rest)
            return
        node = last.children[rest[:_ID_BYTES]] = _Node(rest, last)
        self._order[node] = None
        self._hold(node, address, held)
        nodes.append(node)

    def _split(self, node: _Node, num_bytes: int) -> _Node:
        """Cut an edge in two; return the upper one."""
        parent = node.parent
        assert parent is not None
        upper = _Node(node.text[:num_bytes], parent)
        parent.children[upper.text[:_ID_BYTES]] = upper
        node.text, node.parent = node.text[num_bytes:], upper
        upper.children[node.text[:_ID_BYTES]] = node
        upper.holders = dict.fromkeys(node.holders, 1)
        self._order[upper] = None
        for address in upper.holders:
            self._held[address][upper] = None
        return upper

    def _shrink(self, address: str, held: OrderedDict[_Node, None]) -> None:
        while self._held_bytes[address] > self._max_server_bytes:
            node = next(iter(held))
            if node.holders[address]:  # not a leaf there: a split has put it out of its place
                held.move_to_end(node)
            else:
                self._let_go(node, address)
        while self._num_bytes > self._max_bytes:
            node = next(iter(self._order))
            if node.children:
                self._order.move_to_end(node)
                continue
            for holder in tuple(node.holders):
                self._let_go(node, holder)

    def _let_go(self, node: _Node, address: str) -> None:
        """Believe that a server has evicted a node, of whose children it holds none."""
        del node.holders[address]
        del self._held[address][node]
        self._held_bytes[address] -= len(node.text)
        if node.parent is not None and node.parent is not self._root:
            node.parent.holders[address] -= 1
        if not node.holders:
            self._remove(node)

    def _remove(self, node: _Node) -> None:
        """Take out a node that nobody holds."""
        del self._order[node]
        self._num_bytes -= len(node.text)
        if node.parent is not None:
            node.parent.children.pop(node.text[:_ID_BYTES], None)
            node.parent = None


def text_of(token_ids: NDArray[np.int32]) -> bytes:
    """Return token ids ``(N,)`` as trees have them."""
    return np.ascontiguousarray(token_ids, np.int32).tobytes()


def _num_equal(edge: bytes, text: bytes, at: int) -> int:
    """Return how many bytes of an edge a text has at a place, whole ids only."""
    count = min(len(edge), len(text) - at) // _ID_BYTES
    differs = np.frombuffer(edge, np.int32, count) != np.frombuffer(text, np.int32, count, at)
    first = int(differs.argmax())
    return (first if differs[first] else count) * _ID_BYTES
