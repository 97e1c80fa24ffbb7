from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from rollfeed.errors import RunFailedError
from rollfeed.store.codec import decode, encode
from rollfeed.testing import make_prompt, sample_of
from rollfeed.types import Group, Rollout, SampleStatus, VersionSpan

DrawMaker = Callable[..., Group]


def _rollout(group_index: int, member: int, versions: Sequence[int], tokens_per_version: int) -> Rollout:
    length = len(versions) * tokens_per_version
    sample = sample_of(
        [0, 1],
        range(2, 2 + length),
        logprobs=np.linspace(-2.0, -1.0, length, dtype=np.float32),
        version_spans=tuple(
            VersionSpan(i * tokens_per_version, (i + 1) * tokens_per_version, version)
            for i, version in enumerate(versions)
        ),
        status=SampleStatus.ABORTED,
        group_index=group_index,
        index=member,
        rollout_id=member,
        response="x" * length,
        metadata={"start_rollout_id": 3},
    )
    return Rollout(rollout_id=member, samples=(sample,))


@pytest.fixture
def make_draw() -> DrawMaker:
    """Return a draw whose members each have one run of tokens by each of ``versions``; no members without any."""

    def make(group_index: int, *versions: int, size: int = 2, tokens: int = 4) -> Group:
        prompt = make_prompt("2 +", prompt_id=f"list/{group_index}@e0", token_ids=np.arange(2, dtype=np.int32))
        members = range(size if versions else 0)
        return Group(group_index, prompt, tuple(_rollout(group_index, member, versions, tokens) for member in members))

    return make


class DictSpill:
    """Keeps draws as bytes, and fails when it is told to."""

    def __init__(self) -> None:
        self.kept: dict[int, bytes] = {}
        self.is_full = False
        self.unreadable: set[int] = set()
        self._next = 0

    def put(self, draw: Group) -> int:
        if self.is_full:
            raise RunFailedError("it is full")
        self.kept[self._next] = encode(draw)
        self._next += 1
        return self._next - 1

    def peek(self, handle: int) -> Group:
        if handle in self.unreadable:
            raise RunFailedError("it cannot be read")
        return decode(Group, self.kept[handle])

    def take(self, handle: int) -> Group:
        draw = self.peek(handle)
        del self.kept[handle]
        return draw


@pytest.fixture
def spill() -> DictSpill:
    return DictSpill()
