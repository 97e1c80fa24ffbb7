"""A radix tree of token runs that is searched by the text that clients see.

Its edges are tokens, with who sampled them and their log-probabilities: one text that was sampled in two ways, or by
two policies, has two paths, and none overwrites the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from rollfeed.router.span_cache.token_runs import ASKED, ENDED, PROMPT, TokenRun, common_bytes

_NODE_BYTES = 480
"""That a node takes besides the bytes of its run."""
_FEW_CHILDREN = 8
"""That are looked at one by one."""
_MOST_CHILDREN, _MOST_VISITS = 1 << 12, 1 << 14
"""Of one node, and of all nodes, that a search looks at; the newest ways in which a text was sampled come first."""
_NEVER = -1


class SpanNode:
    """A run of tokens behind those of its parent."""

    __slots__ = ("_few", "_index", "kept_at", "num_children", "parent", "queued", "run", "stamp", "version_seen")

    def __init__(self, run: TokenRun, parent: SpanNode | None) -> None:
        self.run = run
        self.parent = parent
        self.num_children = 0
        self._few: list[SpanNode] = []
        self._index: dict[int, dict[bytes, list[SpanNode]]] | None = None
        """The children by the size of the least text that they need, and by this; in place of few."""
        self.kept_at = 0
        """The stamp at which it was last kept."""
        self.stamp = 0
        """Of its last use."""
        self.version_seen = PROMPT
        """The newest policy version at its last use."""
        self.queued = _NEVER
        """The stamp by which it waits for its eviction, if it does."""

    def __lt__(self, other: SpanNode) -> bool:
        return self.queued < other.queued

    def candidates(self, text: bytes, place: int) -> Iterator[SpanNode]:
        """Give the children that may go on with a text, of one least text the newest first."""
        if self._index is None:
            yield from reversed(self._few)
            return
        for size, by_text in self._index.items():
            yield from reversed(by_text.get(text[place : place + size], ()))

    def add(self, child: SpanNode) -> None:
        self.num_children += 1
        if self._index is not None:
            self._enter(child)
            return
        self._few.append(child)
        if len(self._few) > _FEW_CHILDREN:
            self._index = {}
            for each in self._few:
                self._enter(each)
            self._few = []

    def remove(self, child: SpanNode) -> None:
        self.num_children -= 1
        if self._index is None:
            self._few.remove(child)
            return
        key = child.run.first_text
        of_size = self._index[len(key)]
        of_size[key].remove(child)
        if not of_size[key]:
            del of_size[key]

    def _enter(self, child: SpanNode) -> None:
        assert self._index is not None
        key = child.run.first_text
        self._index.setdefault(len(key), {}).setdefault(key, []).append(child)


class PathFound(NamedTuple):
    """A use of the tree for a text; the greatest is the best."""

    last_end: int
    """Bytes of the text up to the end of the last whole reply; -1 where there is none."""
    reach: int
    """Bytes of the text up to the last token that may be used."""
    has_tail: bool
    """Whether the last tokens are some that the text does not show."""
    kept_at: int
    node: SpanNode
    num_tokens: int
    """Of the last node, from its first one."""


class _Walk(NamedTuple):
    """A path that a text has been followed along."""

    node: SpanNode
    place: int
    """In the text."""
    at: int
    """In the bytes of the ids."""
    last_end: int
    is_open: bool
    """Whether a reply may be under way that began after the last whole one: its first tokens may be used alone."""


class SpanTree:
    """The tree, within ``max_bytes`` of all runs and nodes: what was used last stays."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._root = SpanNode(TokenRun(b"", b"", b"", b"", PROMPT), None)
        self._leaves: list[SpanNode] = []
        """A heap; entries are brought up to date when they come first."""
        self._clock = 0
        self.policy_version = PROMPT
        """The newest that it has been told."""
        self.num_bytes = 0
        self.num_nodes = 0
        self.num_tokens = 0
        self.num_evicted_tokens = 0

    def find(self, text: bytes, *, with_tail: bool, ids: bytes | None = None) -> PathFound | None:
        """Return the best path for the beginning of a text, to a sampled token or to the end of a text asked before.

        The end of a whole reply that is furthest wins, and after it the furthest token of a reply that the client cut.
        A longer reply whose beginning is a whole one is not used beyond that: a client that got the short one has
        written the rest.

        Args:
            text: UTF-8.
            with_tail: Whether tokens that were not shown belong to a reply with which the text ends.
            ids: Tokens that must be those of the path, as bytes; only whole runs are found then.
        """
        best: PathFound | None = None
        ahead, num_visits = [_Walk(self._root, 0, 0, -1, False)], 0
        while ahead and num_visits < _MOST_VISITS:
            walk = ahead.pop()
            for child in islice(walk.node.candidates(text, walk.place), _MOST_CHILDREN):
                num_visits += 1
                found, goes_on = _step(walk, child, text, with_tail=with_tail, ids=ids)
                if found is not None and (best is None or found[:4] > best[:4]):
                    best = found
                if goes_on is not None:
                    ahead.append(goes_on)
        if best is not None:
            self._touch(best.node)
        return best

    def runs_to(self, found: PathFound) -> list[TokenRun]:
        """Return the runs of a path, from the first token of the text to the last that may be used."""
        run = found.node.run
        runs = [run if found.num_tokens == run.num_tokens else run.cut(found.num_tokens)[0]]
        node = found.node.parent
        while node is not None and node.parent is not None:
            runs.append(node.run)
            node = node.parent
        return runs[::-1]

    def insert(self, runs: Sequence[TokenRun], *, policy_version: int) -> None:
        """Put a path into the tree; what stands there already stays, and gets the marks."""
        self.policy_version = max(self.policy_version, policy_version)
        node = self._root
        for run in runs:
            node = self._extend(node, run)
        self._touch(node)
        node.kept_at = self._clock
        if node is not self._root and not node.num_children and node.queued == _NEVER:
            self._queue(node)
        while self.num_bytes > self._max_bytes and (oldest := self._oldest_leaf()) is not None:
            self._evict(oldest)

    def forget_versions_before(self, policy_version: int) -> None:
        """Forget all that was last used when this version was not known yet."""
        while (oldest := self._oldest_leaf()) is not None and oldest.version_seen < policy_version:
            self._evict(oldest)

    def _extend(self, node: SpanNode, run: TokenRun) -> SpanNode:
        """Return the node that ends with a run behind another node."""
        while run.num_tokens:
            child, num_common = self._child_in_common(node, run)
            if child is None:
                child = SpanNode(run, node)
                node.add(child)
                self._count(run, 1)
                return child
            if num_common < child.run.num_tokens:
                child = self._split(child, num_common)
            node = child
            if num_common == run.num_tokens:
                node.run = node.run._replace(marks=node.run.marks | run.marks)
                break
            run = run.cut(num_common)[1]
        return node

    def _child_in_common(self, node: SpanNode, run: TokenRun) -> tuple[SpanNode | None, int]:
        for child in node.candidates(run.text, 0):
            num_common = child.run.num_common_tokens(run)
            if num_common:
                return child, num_common
        return None, 0

    def _split(self, node: SpanNode, num_tokens: int) -> SpanNode:
        """Return a new node that has the first tokens of one, which keeps the others."""
        assert node.parent is not None
        first, rest = node.run.cut(num_tokens)
        upper = SpanNode(first, node.parent)
        upper.kept_at, upper.stamp, upper.version_seen = node.kept_at, node.stamp, node.version_seen
        node.parent.remove(node)
        node.parent.add(upper)
        self._count(node.run, -1)
        node.run, node.parent = rest, upper
        upper.add(node)
        self._count(first, 1)
        self._count(rest, 1)
        return upper

    def _touch(self, node: SpanNode | None) -> None:
        self._clock += 1
        while node is not None:
            node.stamp, node.version_seen = self._clock, self.policy_version
            node = node.parent

    def _count(self, run: TokenRun, sign: int) -> None:
        self.num_bytes += sign * (_NODE_BYTES + run.num_bytes)
        self.num_tokens += sign * run.num_tokens
        self.num_nodes += sign

    def _queue(self, leaf: SpanNode) -> None:
        leaf.queued = leaf.stamp
        heapq.heappush(self._leaves, leaf)

    def _oldest_leaf(self) -> SpanNode | None:
        while self._leaves:
            leaf = self._leaves[0]
            if leaf.num_children:
                heapq.heappop(self._leaves).queued = _NEVER
            elif leaf.queued != leaf.stamp:
                leaf.queued = leaf.stamp
                heapq.heapreplace(self._leaves, leaf)
            else:
                return leaf
        return None

    def _evict(self, leaf: SpanNode) -> None:
        """Take the oldest leaf out."""
        heapq.heappop(self._leaves)
        assert leaf.parent is not None
        leaf.parent.remove(leaf)
        self._count(leaf.run, -1)
        self.num_evicted_tokens += leaf.run.num_tokens
        if leaf.parent is not self._root and not leaf.parent.num_children and leaf.parent.queued == _NEVER:
            self._queue(leaf.parent)


def _step(
    walk: _Walk, child: SpanNode, text: bytes, *, with_tail: bool, ids: bytes | None
) -> tuple[PathFound | None, _Walk | None]:
    """Return what is found of a text in a child of where a walk has come, and how it goes on there."""
    run, place = child.run, walk.place
    if ids is not None and not ids.startswith(run.ids, walk.at):
        return None, None
    if not text.startswith(run.text, place):
        if run.num_shown is not None:
            if with_tail and text[place:] == run.text[: run.num_shown]:
                return PathFound(len(text), len(text), True, child.kept_at, child, run.num_tokens), None
        elif walk.is_open and run.version != PROMPT and ids is None:
            num_tokens, size = run.num_whole_tokens(common_bytes(run.text, text, place), run.num_tokens)
            if num_tokens:
                return PathFound(walk.last_end, place + size, False, child.kept_at, child, num_tokens), None
        return None, None
    place += len(run.text)
    last_end, is_open, num_tokens = walk.last_end, walk.is_open, 0
    if run.marks & ENDED:
        last_end, is_open, num_tokens = place, False, run.num_tokens
    elif run.version != PROMPT and is_open:
        num_tokens = run.num_whole_tokens(len(run.text), run.num_tokens)[0]
    if run.marks & ASKED:
        is_open = True
        num_tokens = run.num_tokens if place == len(text) else num_tokens
    path = PathFound(last_end, place, False, child.kept_at, child, num_tokens) if num_tokens else None
    return path, _Walk(child, place, walk.at + len(run.ids), last_end, is_open)
