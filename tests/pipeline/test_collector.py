from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rollfeed.pipeline.collector import NEW_OBJECTS, rare_collections


@pytest.fixture(autouse=True)
def _threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_the_collector_is_as_before_when_the_last_of_several_blocks_ends() -> None:
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold() == (NEW_OBJECTS, 10, 10)
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (NEW_OBJECTS, 10, 10)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


def test_what_somebody_else_sets_meanwhile_stays() -> None:
    with rare_collections():
        gc.set_threshold(5_000)
    assert gc.get_threshold()[0] == 5_000


@pytest.mark.parametrize("threshold", [0, 2 * NEW_OBJECTS])
def test_a_collector_that_looks_rarely_or_never_is_left_alone(threshold: int) -> None:
    gc.set_threshold(threshold)
    with rare_collections():
        assert gc.get_threshold()[0] == threshold
    assert gc.get_threshold()[0] == threshold


def test_an_error_puts_the_collector_back() -> None:
    with pytest.raises(ValueError, match="stop"), rare_collections():
        raise ValueError("stop")
    assert gc.get_threshold() == (700, 10, 10)
