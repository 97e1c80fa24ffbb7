"""The buffer: prompts that wait, the policy that chooses among them, and the bound on their memory.

Invariant: what was added is taken exactly once. A policy or a disk that fails takes nothing away.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, overload

import numpy as np

from rollfeed.errors import RunFailedError
from rollfeed.faults import blaming, complaint
from rollfeed.protocols import BufferPolicy
from rollfeed.types import Group, Rollout, Sample

_SETTING = "plugins.buffer_policy"
_SAMPLE_BYTES = 2000
"""About what a sample takes besides its arrays and texts, its outline included."""


class Spill(Protocol):
    """A place for groups that do not fit into memory; ``rollfeed.store.SpillFile`` is one."""

    def put(self, group: Group) -> Any:
        """Keep a group and return what names it. Raises RunFailedError if it cannot be kept, as by the others."""

    def peek(self, handle: Any) -> Group:
        """Return a group, which stays."""

    def take(self, handle: Any) -> Group:
        """Return a group and forget it."""


class _Content(NamedTuple):
    """What an entry has, and where the rest is."""

    group: Group
    """Whole, or an outline while there is a handle."""
    handle: Any = None
    """Names it where it is spilled; None while it is in memory."""


@dataclass(slots=True)
class _Entry:
    content: _Content
    """Replaced as one: a snapshot may be read in another thread."""
    num_bytes: int
    """That its rollouts take, or would take, in memory."""

    @property
    def group(self) -> Group:
        return self.content.group

    @property
    def handle(self) -> Any:
        return self.content.handle


class Buffer:
    """Fits :class:`rollfeed.protocols.PromptBuffer`.

    A prompt that waits has ``n_samples_per_prompt`` rollouts, or none yet. What leaves last is spilled where those in
    memory take more than ``max_bytes``; without ``spill`` all stay there.
    """

    def __init__(
        self, policy: BufferPolicy, *, n_samples_per_prompt: int, max_bytes: int, spill: Spill | None = None
    ) -> None:
        self._policy = policy
        self._n_samples_per_prompt = n_samples_per_prompt
        self._max_bytes = max_bytes
        self._spill = spill
        self._entries: list[_Entry] = []
        """By group index."""
        self._policy_version = 0
        self.memory_bytes = 0
        """About what the rollouts in memory take."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_spilled(self) -> int:
        """The number of groups on the disk."""
        return sum(entry.handle is not None for entry in self._entries)

    @property
    def entries(self) -> tuple[Group, ...]:
        """The groups that wait, by group index, as policies see them: outlines of those on the disk."""
        return tuple(entry.group for entry in self._entries)

    def add(self, groups: Iterable[Group]) -> None:
        """Take groups, all or none.

        Raises:
            RunFailedError: If one has another number of rollouts than a group, is in the buffer already, or cannot be
                spilled; in the last case it is in the buffer.
            RunFailedError: If the policy, asked which are to be spilled, raises or returns anything but indices; they
                are in the buffer.
        """
        new = list(groups)
        known = {entry.group.group_index for entry in self._entries}
        for group in new:
            self._check(group, known)
            known.add(group.group_index)
        for group in new:
            entry = _Entry(_Content(group), num_bytes(group))
            self._entries.insert(self._position(group.group_index), entry)
            self.memory_bytes += entry.num_bytes
        self._shrink()

    def take(self, count: int, *, policy_version: int) -> list[Group]:
        """Remove and return up to ``count`` groups, whole, in the order of the policy.

        Raises:
            RunFailedError: If the policy raises or returns anything but indices, each once, or a group cannot be read
                from the disk; nothing is removed.
        """
        self._policy_version = policy_version
        if count <= 0 or not self._entries:
            return []
        chosen = [self._entries[index] for index in self._choose(count)]
        for entry in chosen:
            self._bring_back(entry)
        leaving = {id(entry) for entry in chosen}
        self._entries = [entry for entry in self._entries if id(entry) not in leaving]
        self.memory_bytes -= sum(entry.num_bytes for entry in chosen)
        return [entry.group for entry in chosen]

    def snapshot(self) -> Sequence[Group]:
        """Return all groups, whole, by group index, as they are now; what is on the disk is read at each access."""
        return _Snapshot(self._entries, self._spill)

    def _check(self, group: Group, known: set[int]) -> None:
        if len(group.rollouts) not in (0, self._n_samples_per_prompt):
            raise RunFailedError(
                f"group {group.group_index} has {len(group.rollouts)} rollouts and n_samples_per_prompt = "
                f"{self._n_samples_per_prompt}: the buffer takes whole groups, or prompts without rollouts"
            )
        if group.group_index in known:
            raise RunFailedError(f"group {group.group_index} is in the buffer already: a prompt waits once")

    def _position(self, group_index: int) -> int:
        return bisect_left(self._entries, group_index, key=lambda entry: entry.group.group_index)

    def _bring_back(self, entry: _Entry) -> None:
        """Have an entry whole in memory; snapshots that were taken before go on to have it there."""
        if entry.handle is None or self._spill is None:
            return
        handle = entry.handle
        # In this order, so that it is always somewhere.
        entry.content = _Content(_with_prompt_of(entry, self._spill.peek(handle)))
        self._spill.take(handle)
        self.memory_bytes += entry.num_bytes

    def _shrink(self) -> None:
        """Spill from the end of the policy's order until the rest fits."""
        if self._spill is None or self.memory_bytes <= self._max_bytes:
            return
        order = list(self._choose(len(self._entries)))
        named = set(order)
        # What the policy holds back leaves after everything else.
        order += [index for index in range(len(self._entries)) if index not in named]
        for index in reversed(order):
            entry = self._entries[index]
            if entry.handle is not None or not entry.group.rollouts:
                continue
            entry.content = _Content(outline(entry.group), self._spill.put(entry.group))
            self.memory_bytes -= entry.num_bytes
            if self.memory_bytes <= self._max_bytes:
                return

    def _choose(self, count: int) -> list[int]:
        entries = self.entries
        with blaming(_SETTING, self._policy):
            returned = self._policy(entries, count, policy_version=self._policy_version)
        return _checked(returned, num_entries=len(entries), count=count, policy=self._policy)


class _Snapshot(Sequence[Group]):
    """The groups of some entries, read when they are asked for."""

    def __init__(self, entries: Sequence[_Entry], spill: Spill | None) -> None:
        self._entries = tuple(entries)
        self._spill = spill

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Group: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Group]: ...

    def __getitem__(self, index: int | slice) -> Group | Sequence[Group]:
        if isinstance(index, slice):
            return _Snapshot(self._entries[index], self._spill)
        return _whole(self._entries[index], self._spill)


def _whole(entry: _Entry, spill: Spill | None) -> Group:
    while True:
        group, handle = entry.content
        if handle is None or spill is None:
            return group
        try:
            return _with_prompt_of(entry, spill.peek(handle))
        except KeyError:
            if entry.content.handle is handle:
                raise  # it is nowhere; otherwise it has been brought back meanwhile


def _with_prompt_of(entry: _Entry, whole: Group) -> Group:
    # The prompt has stayed in memory; the one that was read is a second copy.
    return replace(whole, prompt=entry.group.prompt)


def _checked(returned: object, *, num_entries: int, count: int, policy: BufferPolicy) -> list[int]:
    """Return what a policy returned as a list of different indices."""
    try:
        indices = [operator.index(index) for index in returned]  # type: ignore[attr-defined]
    except TypeError:
        raise complaint(_SETTING, policy, f"returned {returned!r:.100}; return a sequence of indices") from None
    if len(indices) > count:
        raise complaint(_SETTING, policy, f"returned {len(indices)} indices; at most {count} were asked for")
    seen: set[int] = set()
    for index in indices:
        if not 0 <= index < num_entries:
            there = f"there are {num_entries} entries, counted from 0"
            raise complaint(_SETTING, policy, f"returned index {index}; {there}")
        if index in seen:
            raise complaint(_SETTING, policy, f"returned index {index} twice; return each once")
        seen.add(index)
    return indices


def num_bytes(group: Group) -> int:
    """Return about how much memory a group's rollouts take."""
    return sum(_sample_bytes(sample) for rollout in group.rollouts for sample in rollout.samples)


def outline(group: Group) -> Group:
    """Return the group with rollouts that have the same statuses, lengths, versions and rewards, but no contents.

    Tokens are -1, logprobs NaN and masks 0, in arrays that take no memory; text and metadata are empty.
    """
    return replace(group, rollouts=tuple(_rollout(rollout) for rollout in group.rollouts))


def _rollout(rollout: Rollout) -> Rollout:
    return replace(rollout, samples=tuple(_sample(sample) for sample in rollout.samples))


def _sample(sample: Sample) -> Sample:
    length = sample.response_length
    return replace(
        sample,
        token_ids=np.broadcast_to(np.int32(-1), (len(sample.token_ids),)),
        loss_mask=np.broadcast_to(np.float32(0.0), (length,)),
        logprobs=np.broadcast_to(np.float32(np.nan), (length,)),
        sampling_mask=None,
        routed_experts=None,
        response="",
        metadata={},
        extra={},
        state={},
    )


def _sample_bytes(sample: Sample) -> int:
    arrays = sample.token_ids.nbytes + sample.loss_mask.nbytes + sample.logprobs.nbytes
    if (mask := sample.sampling_mask) is not None:
        arrays += mask.lengths.nbytes + mask.token_ids.nbytes
    if sample.routed_experts is not None:
        arrays += sample.routed_experts.content.nbytes
    # Metadata is of any depth; its text is about as long as it is large.
    parts = (sample.metadata, sample.extra, sample.state)
    texts = len(sample.response) + sum(len(repr(part)) for part in parts if part)
    return arrays + texts + _SAMPLE_BYTES
