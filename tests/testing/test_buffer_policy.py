from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from rollfeed.buffer import built_in_policy
from rollfeed.config import BufferPolicyName
from rollfeed.protocols import BufferPolicy
from rollfeed.testing import check_buffer_policy
from rollfeed.types import Group


@pytest.mark.parametrize("name", BufferPolicyName)
def test_built_in_policies_keep_the_contract(name: BufferPolicyName) -> None:
    check_buffer_policy(built_in_policy(name, staleness_limit=4))


def returning(make: Any) -> BufferPolicy:
    def policy(entries: Sequence[Group], count: int, *, policy_version: int) -> Any:
        del policy_version
        return make(entries, count)

    return policy


calls = itertools.count()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda entries, count: list(range(len(entries))), "7 indices are returned where 1 are asked for"),
        (lambda entries, count: [0, 0][:count], "twice"),
        (lambda entries, count: [len(entries)], "are returned for 7 entries"),
        (lambda entries, count: [], "none of 7 entries may ever leave"),
        (lambda entries, count: [next(calls) % len(entries)] if entries else [], "and then with"),
        (lambda entries, count: list(entries)[:count], "is not a sequence of indices"),
        (lambda entries, count: None, "is not a sequence of indices"),
    ],
)
def test_a_broken_promise_is_named(make: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_buffer_policy(returning(make))
