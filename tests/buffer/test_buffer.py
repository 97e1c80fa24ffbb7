from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from rollfeed.buffer import Buffer, Spill, fifo, freshest, max_staleness
from rollfeed.errors import RunFailedError
from rollfeed.protocols import BufferPolicy
from rollfeed.store.codec import encode
from rollfeed.store.spill import SpillFile
from rollfeed.types import Group

DrawMaker = Callable[..., Group]


def make_buffer(policy: BufferPolicy = fifo, *, max_bytes: int = 2**30, spill: Spill | None = None) -> Buffer:
    return Buffer(policy, n_samples_per_prompt=2, max_bytes=max_bytes, spill=spill)


def indices(draws: Iterable[Group]) -> list[int]:
    return [draw.group_index for draw in draws]


def returns(value: Any) -> BufferPolicy:
    def policy(entries: Sequence[Group], count: int, *, policy_version: int) -> Any:
        del entries, count, policy_version
        return value

    return policy


def test_r29_buffer_order_and_partial_groups(make_draw: DrawMaker) -> None:
    """R29: of 3 groups put and 5 asked for, the 3 come in order, 2 are left to the source; wrong sizes are refused."""
    buffer = make_buffer()
    buffer.add([make_draw(7, 1), make_draw(2)])
    buffer.add([make_draw(4, 1)])
    assert len(buffer) == 3
    drawn = buffer.take(5, policy_version=1)
    assert indices(drawn) == [2, 4, 7]
    assert [len(draw.rollouts) for draw in drawn] == [0, 2, 2]
    assert len(buffer) == 0
    for size in (1, 3):
        with pytest.raises(RunFailedError, match=rf"group 9 has {size} rollouts and n_samples_per_prompt = 2"):
            buffer.add([make_draw(8, 1), make_draw(9, 1, size=size)])
    assert len(buffer) == 0


def test_the_rest_stays(make_draw: DrawMaker) -> None:
    buffer = make_buffer()
    buffer.add(make_draw(index, 1) for index in range(5))
    assert indices(buffer.take(2, policy_version=1)) == [0, 1]
    assert indices(buffer.entries) == [2, 3, 4]
    assert buffer.take(0, policy_version=1) == []
    buffer.add([make_draw(0, 1)])
    assert indices(buffer.take(9, policy_version=1)) == [0, 2, 3, 4]


def test_a_prompt_waits_once(make_draw: DrawMaker) -> None:
    buffer = make_buffer()
    buffer.add([make_draw(1, 1)])
    for twice in ([make_draw(1)], [make_draw(2), make_draw(2)]):
        with pytest.raises(RunFailedError, match="in the buffer already"):
            buffer.add(twice)
    assert indices(buffer.entries) == [1]


def test_the_order_of_leaving_is_the_policys(make_draw: DrawMaker) -> None:
    def newest_draw(entries: Sequence[Group], count: int, *, policy_version: int) -> list[int]:
        assert policy_version == 5
        assert indices(entries) == [1, 2, 3]
        return list(np.arange(len(entries))[::-1][:count])

    buffer = make_buffer(newest_draw)
    buffer.add([make_draw(3), make_draw(1), make_draw(2)])
    assert indices(buffer.take(2, policy_version=5)) == [3, 2]


def test_a_policy_may_hold_back(make_draw: DrawMaker) -> None:
    buffer = make_buffer(returns([1]))
    buffer.add([make_draw(0), make_draw(1)])
    assert indices(buffer.take(2, policy_version=0)) == [1]
    assert indices(buffer.entries) == [0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0, 0], "returned index 0 twice"),
        ([3], "returned index 3; there are 3 entries"),
        ([-1], "returned index -1; there are 3 entries"),
        ([0, 1, 2], "returned 3 indices; at most 2 were asked for"),
        ([0.0], "return a sequence of indices"),
        (["0"], "return a sequence of indices"),
        (None, "returned None; return a sequence of indices"),
        (0, "returned 0; return a sequence of indices"),
    ],
)
def test_a_policy_that_breaks_its_promise_takes_nothing_away(value: Any, message: str, make_draw: DrawMaker) -> None:
    buffer = make_buffer(returns(value))
    buffer.add(make_draw(index, 1) for index in range(3))
    with pytest.raises(RunFailedError) as caught:
        buffer.take(2, policy_version=1)
    assert message in str(caught.value)
    assert "plugins.buffer_policy (" in str(caught.value)
    assert indices(buffer.entries) == [0, 1, 2]


def test_what_leaves_last_waits_on_the_disk(make_draw: DrawMaker, spill: Any) -> None:
    buffer = make_buffer(max_bytes=50_000, spill=spill)
    draws = [make_draw(index, 1, 2, tokens=200) for index in range(10)]
    buffer.add(draws)
    assert buffer.memory_bytes <= 50_000
    assert buffer.num_spilled == len(spill.kept) > 3
    in_memory = [draw for draw in buffer.entries if draw.rollouts[0].samples[0].response]
    assert indices(in_memory) == list(range(10 - buffer.num_spilled))
    drawn = buffer.take(10, policy_version=2)
    assert [encode(draw) for draw in drawn] == [encode(draw) for draw in draws]
    assert (buffer.memory_bytes, buffer.num_spilled, spill.kept) == (0, 0, {})


def test_policies_see_versions_and_lengths_of_what_is_on_the_disk(make_draw: DrawMaker, spill: Any) -> None:
    buffer = make_buffer(max_bytes=0, spill=spill)
    buffer.add([make_draw(0, 4, 6), make_draw(1, 5), make_draw(2)])
    assert buffer.num_spilled == 2
    (sample,) = buffer.entries[0].rollouts[1].samples
    assert [span.policy_version for span in sample.version_spans] == [4, 6]
    assert (sample.response_length, sample.prompt_length, sample.index, sample.response) == (8, 2, 1, "")
    assert set(sample.token_ids.tolist()) == {-1}
    assert np.isnan(sample.logprobs).all()
    assert indices(buffer.take(3, policy_version=6)) == [0, 1, 2]


@pytest.mark.parametrize("policy", [fifo, freshest, max_staleness(2)])
def test_spilling_changes_nothing_of_what_is_taken(policy: BufferPolicy, make_draw: DrawMaker, tmp_path: Path) -> None:
    """Random additions and takings give the same draws in the same order, whatever fits into memory."""

    def history(max_bytes: int) -> list[bytes]:
        folder = SpillFile(tmp_path / f"{max_bytes}")
        buffer, random, taken, num_added = make_buffer(policy, max_bytes=max_bytes, spill=folder), Random(5), [], 0
        for version in range(60):
            versions = [[], [version], [max(0, version - 3), version], [max(0, version - random.randrange(6))]]
            for _ in range(random.randrange(4)):
                buffer.add([make_draw(num_added, *random.choice(versions), tokens=20)])
                num_added += 1
            assert buffer.memory_bytes <= max(max_bytes, 0)
            taken += [encode(draw) for draw in buffer.take(random.randrange(4), policy_version=version)]
        taken += [encode(draw) for draw in buffer.take(num_added, policy_version=60)]
        assert len(taken) == num_added > 60
        assert list((tmp_path / f"{max_bytes}").iterdir()) == []
        return taken

    assert history(2**30) == history(20_000) == history(0)


def test_a_snapshot_is_whole_ordered_and_stays_as_it_was(make_draw: DrawMaker, spill: Any) -> None:
    buffer = make_buffer(freshest, max_bytes=10_000, spill=spill)
    draws = [make_draw(index, 9 - index, tokens=200) for index in range(6)]
    buffer.add(reversed(draws))
    snapshot = buffer.snapshot()
    assert buffer.num_spilled > 0
    expected = [encode(draw) for draw in draws]
    assert [encode(draw) for draw in snapshot] == expected
    assert [encode(draw) for draw in snapshot[1:3]] == expected[1:3]
    buffer.take(4, policy_version=9)
    buffer.add([make_draw(20, 1, tokens=500)])
    assert len(snapshot) == 6
    assert [encode(draw) for draw in snapshot] == expected


def test_without_a_place_to_spill_everything_stays_in_memory(make_draw: DrawMaker) -> None:
    buffer = make_buffer(max_bytes=0)
    buffer.add([make_draw(0, 1)])
    assert buffer.num_spilled == 0
    assert buffer.memory_bytes > 0
    assert buffer.take(1, policy_version=1)[0].rollouts[0].samples[0].response


def test_a_full_disk_loses_nothing(make_draw: DrawMaker, spill: Any) -> None:
    buffer = make_buffer(max_bytes=0, spill=spill)
    spill.is_full = True
    draw = make_draw(0, 1)
    with pytest.raises(RunFailedError, match="it is full"):
        buffer.add([draw])
    assert encode(buffer.take(1, policy_version=1)[0]) == encode(draw)


def test_a_draw_that_cannot_be_read_back_takes_nothing_away(make_draw: DrawMaker, spill: Any) -> None:
    buffer = make_buffer(max_bytes=0, spill=spill)
    draws = [make_draw(0, 1), make_draw(1, 1)]
    buffer.add(draws)
    spill.unreadable = {min(spill.kept)}
    with pytest.raises(RunFailedError, match="it cannot be read"):
        buffer.take(2, policy_version=1)
    assert len(buffer) == 2
    spill.unreadable = set()
    assert list(map(encode, buffer.take(2, policy_version=1))) == list(map(encode, draws))
    assert (buffer.memory_bytes, spill.kept) == (0, {})


def test_a_snapshot_may_be_read_in_a_thread_while_draws_are_spilled_and_brought_back(
    make_draw: DrawMaker, spill: Any
) -> None:
    draws = [make_draw(number) for number in range(6)]
    expected = [encode(draw) for draw in draws]
    buffer = Buffer(fifo, n_samples_per_prompt=2, max_bytes=1, spill=spill)
    buffer.add(draws)
    snapshots, wrong, ended = [buffer.snapshot()], [], threading.Event()

    def read() -> None:
        while not ended.is_set():
            if [encode(draw) for draw in snapshots[0]] != expected:
                wrong.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(200):
        buffer.add(buffer.take(6, policy_version=0))
    ended.set()
    reader.join()
    assert wrong == []
