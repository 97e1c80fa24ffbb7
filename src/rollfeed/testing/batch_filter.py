"""The contract check of batch filters."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from rollfeed.protocols import BatchFilter
from rollfeed.testing.contracts import make_group
from rollfeed.types import Group


def check_batch_filter(batch_filter: BatchFilter, *, rollout_batch_size: int = 4) -> None:
    """Check that a filter returns a batch of indices, each once, and the same ones when it is asked again.

    Args:
        batch_filter: What is checked.
        rollout_batch_size: Groups of the batches that it is written for.
    """
    spreads = [0.0, 1.0, 0.0, 0.25, 1.0, 0.5]
    for num_groups in (2 * rollout_batch_size, rollout_batch_size):
        groups = [
            make_group([0.5 - spread, 0.5 + spread], group_index=3 * index)
            for index, spread in enumerate(spreads[number % len(spreads)] for number in range(num_groups))
        ]
        chosen = _indices(batch_filter, groups)
        assert len(set(chosen)) == len(chosen), f"an index is returned twice: {chosen}"
        outside = [index for index in chosen if not 0 <= index < num_groups]
        assert not outside, f"indices {outside} are returned for {num_groups} groups"
        assert len(chosen) >= rollout_batch_size, f"{len(chosen)} indices make no batch of {rollout_batch_size} groups"
        again = _indices(batch_filter, groups)
        assert again == chosen, f"the same groups are answered with {chosen} and then with {again}"


def _indices(batch_filter: BatchFilter, groups: Sequence[Group]) -> list[int]:
    returned: object = batch_filter(list(groups))
    try:
        return [operator.index(index) for index in returned]  # type: ignore[attr-defined]
    except TypeError:
        raise AssertionError(f"{returned!r} is not a sequence of indices") from None
