"""The contract check of buffer policies."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

from rollfeed.protocols import BufferPolicy
from rollfeed.testing.contracts import make_prompt, make_sample
from rollfeed.types import Group, Rollout, SampleStatus, VersionSpan

_POLICY_VERSION = 9


def check_buffer_policy(policy: BufferPolicy) -> None:
    """Check that a policy returns indices, each once, and the same ones when it is asked again."""
    entries = [_draw(index, version) for index, version in enumerate((None, 3, 9, 7, None, 3, 8))]
    for waiting in (entries, entries[:1], []):
        for count in (1, 3, len(entries), 2 * len(entries)):
            chosen = _indices(policy, waiting, count)
            assert len(chosen) <= count, f"{len(chosen)} indices are returned where {count} are asked for"
            assert len(set(chosen)) == len(chosen), f"an index is returned twice: {chosen}"
            outside = [index for index in chosen if not 0 <= index < len(waiting)]
            assert not outside, f"indices {outside} are returned for {len(waiting)} entries"
            again = _indices(policy, waiting, count)
            assert again == chosen, f"the same entries are answered with {chosen} and then with {again}"
    assert _indices(policy, entries, len(entries)), "none of 7 entries may ever leave"


def _indices(policy: BufferPolicy, entries: Sequence[Group], count: int) -> list[int]:
    returned: object = policy(tuple(entries), count, policy_version=_POLICY_VERSION)
    try:
        return [operator.index(index) for index in returned]  # type: ignore[attr-defined]
    except TypeError:
        raise AssertionError(f"{returned!r} is not a sequence of indices") from None


def _draw(group_index: int, version: int | None) -> Group:
    """Return a fresh prompt, or one with two members that were aborted at a version."""
    if version is None:
        return Group(group_index, make_prompt())
    rollouts = [
        Rollout(
            rollout_id=2 * group_index + member,
            samples=(
                replace(
                    make_sample("12", reward=None, member=2 * group_index + member),
                    version_spans=(VersionSpan(0, 2, version),),
                    status=SampleStatus.ABORTED,
                    group_index=group_index,
                ),
            ),
        )
        for member in range(2)
    ]
    return Group(group_index, make_prompt(), tuple(rollouts))
