from random import Random

import pytest

from rollfeed.pipeline.ledger import Ledger, Place
from rollfeed.types import LedgerCounts


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
        moves = {
            Place.REQUEUED: [Place.IN_FLIGHT],
            Place.IN_FLIGHT: [place for place in Place if place is not Place.IN_FLIGHT],
            Place.SURPLUS: [Place.TRAINED, Place.DISCARDED, Place.SURPLUS, Place.DROPPED, Place.REQUEUED],
        }[live[index]]
        place = random.choice(moves)
        ledger.move(index, place)
        if place in (Place.REQUEUED, Place.IN_FLIGHT, Place.SURPLUS):
            live[index] = place
        else:
            del live[index]
        assert ledger.counts().balanced
    assert ledger.counts().drawn == next_index


def test_a_prompt_cannot_end_twice() -> None:
    ledger = Ledger(LedgerCounts(), requeued=[], surplus=[])
    ledger.draw(0)
    ledger.move(0, Place.IN_FLIGHT)
    ledger.move(0, Place.TRAINED)
    with pytest.raises(AssertionError, match="has ended"):
        ledger.move(0, Place.DROPPED)


def test_a_prompt_cannot_be_drawn_twice() -> None:
    ledger = Ledger(LedgerCounts(drawn=1, requeued=1), requeued=[3], surplus=[])
    with pytest.raises(AssertionError, match="drawn twice"):
        ledger.draw(3)


@pytest.mark.parametrize("here", [Place.REQUEUED, Place.SURPLUS])
def test_a_prompt_that_waits_goes_nowhere_but_where_it_may(here: Place) -> None:
    allowed = {
        Place.REQUEUED: {Place.IN_FLIGHT},
        Place.SURPLUS: {Place.TRAINED, Place.DISCARDED, Place.SURPLUS, Place.DROPPED, Place.REQUEUED},
    }[here]
    for place in Place:
        ledger = Ledger(LedgerCounts(), requeued=[], surplus=[])
        ledger.draw(0)
        if here is Place.SURPLUS:
            ledger.move(0, Place.IN_FLIGHT)
            ledger.move(0, Place.SURPLUS)
        if place in allowed:
            ledger.move(0, place)
            assert getattr(ledger.counts(), place.value) == 1
        else:
            with pytest.raises(AssertionError, match=f"cannot go from {here.value} to {place.value}"):
                ledger.move(0, place)
