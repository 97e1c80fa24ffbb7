from __future__ import annotations

import pytest

from rollfeed.errors import RunFailedError
from rollfeed.filters import compose
from rollfeed.types import Drop, Keep


def test_a_drop_is_false_and_a_keep_is_true() -> None:
    assert not Drop("low_reward")
    assert not Drop("zero_std_0.0", usable=True)
    assert Keep()


def test_compose_of_nothing_keeps_everything() -> None:
    assert compose([])([]) == Keep()


def test_compose_returns_the_first_drop() -> None:
    rules = [lambda samples: Keep(), lambda samples: Drop("a"), lambda samples: Drop("b")]
    assert compose(rules)([]) == Drop("a")


def test_compose_prefers_a_final_drop_to_a_usable_one() -> None:
    usable, final = Drop("a", usable=True), Drop("b")
    assert compose([lambda samples: usable, lambda samples: Keep(), lambda samples: final])([]) == final
    assert compose([lambda samples: usable, lambda samples: Drop("c", usable=True)])([]) == usable


def test_compose_refuses_a_filter_that_returns_a_bool() -> None:
    def keeps(samples: object) -> bool:
        return True

    with pytest.raises(
        RunFailedError, match=r"plugins.group_filters \(.*keeps\) returned True; return Keep.*test_compose.py:"
    ):
        compose([keeps])([])
