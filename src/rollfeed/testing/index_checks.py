"""Contract checks of functions that choose among groups by index: batch filters and buffer policies."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rollfeed.protocols import BatchFilter, BufferPolicy
from rollfeed.testing.builders import make_group, make_prompt, make_sample
from rollfeed.types import Group, Rollout, SampleStatus, VersionSpan

_POLICY_VERSION = 9


def check_batch_filter(batch_filter: BatchFilter, *, rollout_batch_size: int = 4) -> None:
    """Check that a filter returns a batch of indices, each once, and the same ones when it is asked again."""
    spreads = [0.0, 1.0, 0.0, 0.25, 1.0, 0.5]
    for num_groups in (2 * rollout_batch_size, rollout_batch_size):
        groups = [
            make_group([0.5 - spread, 0.5 + spread], group_index=3 * index)
            for index, spread in enumerate(spreads[number % len(spreads)] for number in range(num_groups))
        ]
        chosen = _chosen(partial(batch_filter, list(groups)), num_groups)
        assert len(chosen) >= rollout_batch_size, f"{len(chosen)} indices make no batch of {rollout_batch_size} groups"


def check_buffer_policy(policy: BufferPolicy) -> None:
    """Check that a policy returns indices, each once, and the same ones when it is asked again."""
    entries = [_draw(index, version) for index, version in enumerate((None, 3, 9, 7, None, 3, 8))]

    def choose(waiting: Sequence[Group], count: int) -> list[int]:
        return _chosen(lambda: policy(tuple(waiting), count, policy_version=_POLICY_VERSION), len(waiting))

    for waiting in (entries, entries[:1], []):
        for count in (1, 3, len(entries), 2 * len(entries)):
            chosen = choose(waiting, count)
            assert len(chosen) <= count, f"{len(chosen)} indices are returned where {count} are asked for"
    assert choose(entries, len(entries)), "none of 7 entries may ever leave"


def _chosen(choose: Callable[[], Sequence[int]], num_entries: int) -> list[int]:
    """Return the indices that a function chooses, after checking them."""
    chosen, again = _indices(choose()), _indices(choose())
    assert len(set(chosen)) == len(chosen), f"an index is returned twice: {chosen}"
    outside = [index for index in chosen if not 0 <= index < num_entries]
    assert not outside, f"indices {outside} are returned for {num_entries} entries"
    assert again == chosen, f"the same entries are answered with {chosen} and then with {again}"
    return chosen


def _indices(returned: object) -> list[int]:
    try:
        return [operator.index(index) for index in returned]  # type: ignore[attr-defined]
    except TypeError:
        raise AssertionError(f"{returned!r} is not a sequence of indices") from None


def _draw(group_index: int, version: int | None) -> Group:
    """Return a fresh prompt, or one with two members that were aborted at a version."""
    if version is None:
        return Group(group_index, make_prompt())
    changes: dict[str, Any] = {
        "group_index": group_index,
        "version_spans": (VersionSpan(0, 2, version),),
        "status": SampleStatus.ABORTED,
    }
    samples = [make_sample("12", reward=None, member=2 * group_index + member, **changes) for member in range(2)]
    rollouts = tuple(Rollout(rollout_id=sample.rollout_id, samples=(sample,)) for sample in samples)
    return Group(group_index, make_prompt(), rollouts)
