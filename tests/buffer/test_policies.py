from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from rollfeed.buffer import built_in_policy, fifo, freshest, max_staleness, oldest_version
from rollfeed.config import BufferPolicyName
from rollfeed.errors import ConfigError
from rollfeed.plugins import check_fits
from rollfeed.protocols import BufferPolicy
from rollfeed.types import Group

DrawMaker = Callable[..., Group]


def chosen(policy: BufferPolicy, entries: Sequence[Group], count: int, policy_version: int = 10) -> list[int]:
    return [entries[index].group_index for index in policy(entries, count, policy_version=policy_version)]


def test_the_age_of_a_draw_is_that_of_its_oldest_token(make_draw: DrawMaker) -> None:
    assert oldest_version(make_draw(0, 5, 9)) == 5
    assert oldest_version(make_draw(0)) is None


def test_fifo_is_the_order_of_the_draws(make_draw: DrawMaker) -> None:
    entries = [make_draw(4, 9), make_draw(1), make_draw(7, 1)]
    assert chosen(fifo, entries, 2) == [1, 4]
    assert chosen(fifo, entries, 9) == [1, 4, 7]


def test_freshest_takes_the_newest_tokens_first(make_draw: DrawMaker) -> None:
    entries = [make_draw(0, 3), make_draw(1, 2, 9), make_draw(2, 7), make_draw(3), make_draw(4, 7), make_draw(5, 10)]
    assert chosen(freshest, entries, 6) == [3, 5, 2, 4, 0, 1]
    assert chosen(freshest, entries, 1) == [3]


def test_max_staleness_goes_on_with_what_would_soon_be_too_old(make_draw: DrawMaker) -> None:
    entries = [
        make_draw(0, 5),
        make_draw(1),
        make_draw(2, 9),
        make_draw(3, 6),
        make_draw(4, 8, 9),
        make_draw(5, 1),
        make_draw(6, 8),
    ]
    assert chosen(max_staleness(4), entries, 7) == [3, 4, 6, 2, 1, 0, 5]
    assert chosen(max_staleness(0), entries, 2) == [1, 0]
    assert chosen(max_staleness(4), entries, 3, policy_version=9) == [0, 3, 4]


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_staleness = -1"):
        max_staleness(-1)


@pytest.mark.parametrize("policy", [fifo, freshest, max_staleness(2)])
def test_built_in_policies_fit_the_protocol(policy: BufferPolicy) -> None:
    check_fits(policy, BufferPolicy, key="buffer policy")
    assert list(policy([], 3, policy_version=0)) == []


def test_policies_are_found_by_the_names_of_the_settings(make_draw: DrawMaker) -> None:
    entries = [make_draw(0, 5), make_draw(1, 8), make_draw(2, 7)]
    orders = {name: chosen(built_in_policy(name, staleness_limit=3), entries, 3) for name in BufferPolicyName}
    assert orders == {"fifo": [0, 1, 2], "freshest": [1, 2, 0], "max_staleness": [2, 1, 0]}
