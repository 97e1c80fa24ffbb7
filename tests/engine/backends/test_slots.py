from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from rollfeed.engine.backends.slots import Slots


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


class NotedCache:
    """Knows which slot's values lie at each position, as computed or copied."""

    def __init__(self, num_slots: int) -> None:
        self.owner = np.zeros((num_slots, 16))

    def copy_positions(self, donor: int, slot: int, start: int, end: int) -> None:
        self.owner[slot, start:end] = self.owner[donor, start:end]

    def erase(self, slot: int) -> None:
        self.owner[slot] = 0.0


class NotedSlots(Slots):
    """Slots over a cache that tests look into."""

    def __init__(self, *, num_slots: int, whole_prompts_only: bool) -> None:
        self.cache = NotedCache(num_slots)
        super().__init__(self.cache, num_slots=num_slots, capacity=16, whole_prompts_only=whole_prompts_only)


def make_slots(*, num_slots: int = 3, whole_prompts_only: bool = False) -> NotedSlots:
    return NotedSlots(num_slots=num_slots, whole_prompts_only=whole_prompts_only)


def fill(slots: NotedSlots, slot: int, count: int) -> None:
    """Pretend that a pass wrote the next ``count`` tokens; each slot has its own values."""
    start = slots.num_computed(slot)
    slots.cache.owner[slot, start : start + count] = slot + 1.0
    slots.advance(slot, count)


def test_a_prompt_takes_the_lowest_free_slot_that_holds_nothing() -> None:
    slots = make_slots()
    assert [slots.occupy(ids(1, 2, 3))[0] for _ in range(3)] == [0, 1, 2]
    assert not slots.has_free()
    slots.release(1)
    assert slots.occupy(ids(7, 8))[0] == 1


def test_conversations_in_turn_keep_what_they_have() -> None:
    slots = make_slots()
    texts = [[number, 1, 2, 3] for number in (4, 5)]
    for turn in range(3):
        for text in texts:
            slot, kept = slots.occupy(ids(*text))
            assert kept == (len(text) - 1 if turn else 0)
            fill(slots, slot, len(text) - 1 - kept)
            text.append(6)
            slots.append(slot, len(text) - 1, 6)
            fill(slots, slot, 1)
            slots.release(slot)


def test_slots_that_were_never_used_stay_so() -> None:
    slots = make_slots(num_slots=40)
    for number in range(100):
        slot, _ = slots.occupy(ids(number, number + 1))
        fill(slots, slot, 1)
        slots.release(slot)
        assert slot < 8


def test_the_same_prompt_is_copied_up_to_its_last_token() -> None:
    slots = make_slots()
    slots.occupy(ids(1, 2, 3, 4))
    fill(slots, 0, 3)
    slots.occupy(ids(1, 2, 3, 4))
    assert slots.copy_longest_prefix(1) == 3
    assert slots.prefill_remaining(1) == 0
    assert (slots.cache.owner[1, :3] == 1.0).all()
    assert (slots.cache.owner[1, :3] == 1.0).all()


def test_a_common_beginning_is_copied_and_the_rest_is_left_to_compute() -> None:
    slots = make_slots()
    slots.occupy(ids(1, 2, 3, 4, 5))
    fill(slots, 0, 4)
    slots.occupy(ids(1, 2, 9, 9, 9))
    assert slots.copy_longest_prefix(1) == 2
    assert slots.prefill_remaining(1) == 2


def test_only_what_has_been_computed_is_copied() -> None:
    slots = make_slots()
    slots.occupy(ids(1, 2, 3, 4, 5))
    fill(slots, 0, 2)
    slots.occupy(ids(1, 2, 3, 4, 6))
    assert slots.copy_longest_prefix(1) == 2
    assert slots.shares_unfinished_prefill(1, 0)
    fill(slots, 0, 2)
    assert slots.copy_longest_prefix(1) == 2
    assert not slots.shares_unfinished_prefill(1, 0)


def test_a_resumed_request_goes_on_in_its_own_slot() -> None:
    slots = make_slots()
    for first in (1, 5, 7):
        slots.occupy(ids(first, 2))
    for slot in range(3):
        fill(slots, slot, 2)
        slots.append(slot, 2, 8)
        fill(slots, slot, 1)
    for slot in range(3):
        slots.release(slot)
    assert slots.occupy(ids(5, 2, 8, 9)) == (1, 3)


def test_a_longer_prefix_elsewhere_replaces_a_shorter_own_one() -> None:
    slots = make_slots()
    slots.occupy(ids(1, 2, 3, 4, 5))
    fill(slots, 0, 4)
    slots.occupy(ids(1, 9))
    fill(slots, 1, 1)
    slots.release(1)
    assert slots.occupy(ids(1, 2, 3, 4, 6)) == (1, 1)
    assert slots.copy_longest_prefix(1) == 3
    assert slots.cache.owner[1, :4].tolist() == [2.0, 1.0, 1.0, 1.0]


def test_nothing_computed_by_older_weights_is_shared() -> None:
    slots = make_slots()
    slots.occupy(ids(1, 2, 3))
    fill(slots, 0, 2)
    fill(slots, 0, 1)  # decoding has begun
    slots.occupy(ids(1, 2, 3))
    slots.copy_longest_prefix(1)
    slots.invalidate()
    assert slots.num_computed(0) == 3
    assert slots.num_computed(1) == 0
    assert slots.copy_longest_prefix(1) == 0
    slots.release(0)
    assert slots.occupy(ids(1, 2, 3)) == (0, 0)


def test_erasing_a_slot_leaves_zeros_and_nothing_to_share() -> None:
    slots = make_slots()
    slots.occupy(ids(1, 2, 3))
    fill(slots, 0, 2)
    slots.erase(0)
    assert not slots.cache.owner.any()
    assert slots.occupy(ids(1, 2, 3)) == (0, 0)


@pytest.mark.parametrize("prompt", [ids(1, 2, 3, 4, 5), ids(1, 2), ids(1, 9, 3)])
def test_whole_prompts_only_shares_with_the_same_prompt_alone(prompt: NDArray[np.int32]) -> None:
    slots = make_slots(whole_prompts_only=True)
    slots.occupy(ids(1, 2, 3))
    fill(slots, 0, 2)
    slots.occupy(prompt)
    assert slots.copy_longest_prefix(1) == 0
    slots.occupy(ids(1, 2, 3))
    assert slots.shares_unfinished_prefill(2, 0)
    assert slots.copy_longest_prefix(2) == 2


def test_random_use_copies_exactly_the_common_computed_prefix() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        slots = make_slots(num_slots=4)
        prompts = [random.integers(0, 2, random.integers(1, 8)).astype(np.int32) for _ in range(4)]
        for prompt in prompts[:3]:
            slot, _ = slots.occupy(prompt)
            fill(slots, slot, int(random.integers(0, len(prompt))))
        slot, kept = slots.occupy(prompts[3])
        assert (slot, kept) == (3, 0)
        common = [0]
        for other, prompt in enumerate(prompts[:3]):
            limit = min(len(prompts[3]) - 1, slots.num_computed(other))
            same = [bool(prompts[3][index] == prompt[index]) for index in range(limit)]
            common.append(same.index(False) if False in same else limit)
        assert slots.copy_longest_prefix(3) == max(common)
