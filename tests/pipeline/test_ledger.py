from random import Random

import pytest

from rollfeed.pipeline.ledger import Ledger
from rollfeed.testing import make_prompt
from rollfeed.types import (
    Discarded,
    Dropped,
    Ending,
    Failed,
    Group,
    LedgerCounts,
    Place,
    Requeued,
    Surplus,
    Trained,
)

ENDINGS: dict[Place, type[Ending]] = {
    kind.place: kind for kind in (Discarded, Dropped, Failed, Requeued, Surplus, Trained)
}
MOVES = {
    Place.REQUEUED: {Place.IN_FLIGHT, Place.REQUEUED},
    Place.IN_FLIGHT: {place for place in Place if place is not Place.IN_FLIGHT},
    Place.SURPLUS: {Place.TRAINED, Place.DISCARDED, Place.SURPLUS, Place.DROPPED, Place.REQUEUED},
}


def move(ledger: Ledger, group_index: int, place: Place) -> None:
    if place is Place.IN_FLIGHT:
        ledger.submit(group_index)
    else:
        ledger.book(ENDINGS[place](Group(group_index, make_prompt()), "why"))


def test_counts_balance_after_any_sequence_of_legal_moves() -> None:
    random = Random(0)
    ledger = Ledger(LedgerCounts(), requeued=[], surplus=[])
    live: dict[int, Place] = {}
    next_index = 0
    for _ in range(5000):
        if not live or random.random() < 0.3:
            ledger.draw(next_index)
            live[next_index] = Place.REQUEUED
            next_index += 1
        index = random.choice(list(live))
        place = random.choice(sorted(MOVES[live[index]]))
        move(ledger, index, place)
        if place in MOVES:
            live[index] = place
        else:
            del live[index]
        assert ledger.counts().balanced
    assert ledger.counts().drawn == next_index


def test_a_prompt_cannot_end_twice() -> None:
    ledger = Ledger(LedgerCounts(), requeued=[], surplus=[])
    ledger.draw(0)
    move(ledger, 0, Place.IN_FLIGHT)
    move(ledger, 0, Place.TRAINED)
    with pytest.raises(AssertionError, match="has ended"):
        move(ledger, 0, Place.DROPPED)


def test_a_prompt_cannot_be_drawn_twice() -> None:
    ledger = Ledger(LedgerCounts(drawn=1, requeued=1), requeued=[3], surplus=[])
    with pytest.raises(AssertionError, match="drawn twice"):
        ledger.draw(3)


@pytest.mark.parametrize("here", [Place.REQUEUED, Place.SURPLUS])
def test_a_prompt_that_waits_goes_nowhere_but_where_it_may(here: Place) -> None:
    for place in Place:
        ledger = Ledger(LedgerCounts(), requeued=[], surplus=[])
        ledger.draw(0)
        if here is Place.SURPLUS:
            move(ledger, 0, Place.IN_FLIGHT)
            move(ledger, 0, Place.SURPLUS)
        if place in MOVES[here]:
            move(ledger, 0, place)
            assert getattr(ledger.counts(), place.value) == 1
        else:
            with pytest.raises(AssertionError, match=f"cannot go from {here.value} to {place.value}"):
                move(ledger, 0, place)


def test_a_step_is_counted_by_itself() -> None:
    ledger = Ledger(LedgerCounts(), requeued=[], surplus=[])
    for group_index, place in enumerate((Place.DROPPED, Place.TRAINED)):
        ledger.begin_step()
        ledger.draw(group_index)
        move(ledger, group_index, Place.IN_FLIGHT)
        move(ledger, group_index, place)
    metrics = ledger.step_metrics()
    assert (metrics["rollout/groups_submitted"], metrics["rollout/groups_dropped"]) == (1, 0)
    assert "rollout/dynamic_filter/drop_why" not in metrics
