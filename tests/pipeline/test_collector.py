from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from rollfeed.pipeline.collector import NEW_OBJECTS, NOT_NOW, FullCollections, rare_collections

FIRST = NEW_OBJECTS, 10, 10
WHOLE, YOUNG = {"generation": 2}, {"generation": 1}


@pytest.fixture(autouse=True)
def _threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


class Steered:
    """Full collections by a clock and a memory that a test sets."""

    def __init__(self, thresholds: tuple[int, int, int] = FIRST) -> None:
        self.now, self.memory, self.thresholds = 1_000.0, 100, thresholds
        self.collections = FullCollections(clock=lambda: self.now, peak=lambda: self.memory)

    def __enter__(self) -> Steered:
        self.collections.begin(*self.thresholds)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.collections.end()

    def take(self, seconds: float, about: dict[str, int]) -> int:
        """Have a collection taken so long; return the third threshold after it."""
        self.collections.note("start", about)
        self.now += seconds
        self.collections.note("stop", about)
        return gc.get_threshold()[2]


class Circle:
    def __init__(self) -> None:
        self.itself = self


def test_the_collector_is_as_before_when_the_last_of_several_blocks_ends() -> None:
    callbacks = list(gc.callbacks)
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold()[:2] == FIRST[:2]
    first.__exit__(None, None, None)
    assert gc.get_threshold()[:2] == FIRST[:2]
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)
    assert gc.callbacks == callbacks


def test_what_somebody_else_sets_meanwhile_stays() -> None:
    with rare_collections():
        gc.set_threshold(5_000)
        gc.collect()
        assert gc.get_threshold()[0] == 5_000
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


def test_what_others_have_frozen_stays_so() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with rare_collections():
            gc.collect()
        assert before / 2 < gc.get_freeze_count() <= before
    finally:
        gc.unfreeze()


def test_a_list_of_callbacks_that_somebody_else_has_emptied_is_left_so() -> None:
    before = list(gc.callbacks)
    try:
        with rare_collections():
            gc.callbacks.clear()
        assert gc.callbacks == []
    finally:
        gc.callbacks[:] = before


def test_after_a_full_collection_the_next_one_waits_two_hundred_times_as_long() -> None:
    with Steered() as steered:
        assert gc.get_threshold() == FIRST
        assert steered.take(2.0, WHOLE) == NOT_NOW
        assert steered.take(0.5, YOUNG) == NOT_NOW
        steered.now += 398.0
        assert steered.take(0.5, YOUNG) == NOT_NOW
        assert steered.take(1.5, YOUNG) == 10


def test_a_full_collection_does_not_wait_where_memory_has_grown_by_half() -> None:
    with Steered() as steered:
        steered.take(2.0, WHOLE)
        steered.memory = 150
        assert steered.take(0.5, YOUNG) == NOT_NOW
        steered.memory = 151
        assert steered.take(0.5, YOUNG) == 10
        assert steered.take(2.0, WHOLE) == NOT_NOW


def test_a_block_goes_on_where_the_last_one_stopped() -> None:
    steered = Steered()
    with steered:
        steered.take(2.0, WHOLE)
    with steered:
        assert gc.get_threshold() == (*FIRST[:2], NOT_NOW)
    steered.now += 400.0
    with steered:
        assert gc.get_threshold() == FIRST


def test_garbage_that_has_grown_old_goes_when_a_full_collection_may_be() -> None:
    kept: list[object] = []
    gc.freeze()  # what tests have made: the collector's own rule counts it
    try:
        with Steered((500, 2, 2)) as steered:
            gc.collect()
            steered.take(2.0, WHOLE)
            circle = Circle()
            gone = weakref.ref(circle)
            gc.collect(1)
            gc.collect(1)  # it is old now
            del circle
            kept += [[] for _ in range(20_000)]
            assert gone() is not None
            steered.now += 400.0
            kept += [[] for _ in range(20_000)]
            assert gone() is None
    finally:
        gc.unfreeze()
