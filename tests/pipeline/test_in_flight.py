"""Groups in flight, and which of them have ended."""

from __future__ import annotations

import asyncio

from rollfeed.pipeline.context import InFlight
from rollfeed.protocols import RunningGroup
from rollfeed.testing import make_group
from rollfeed.types import Group


def start(in_flight: InFlight, group_index: int, ended: asyncio.Event) -> None:
    group = make_group([1.0], group_index=group_index)

    async def work() -> Group:
        await ended.wait()
        return group

    in_flight.start(RunningGroup.of(group, n_samples_per_prompt=1, policy_version=0), work)


async def test_those_that_ended_are_told_once() -> None:
    in_flight, events = InFlight(), [asyncio.Event() for _ in range(3)]
    for group_index, ended in enumerate(events):
        start(in_flight, group_index, ended)
    events[2].set()
    events[0].set()
    told = list(await in_flight.changed())
    while len(told) < 2:
        told += await in_flight.changed()
    assert sorted(told) == [0, 2]
    in_flight.ring()
    assert not list(await in_flight.changed())
    events[1].set()
    assert list(await in_flight.changed()) == [1]


async def test_one_that_was_taken_is_not_told_any_more() -> None:
    in_flight, ended = InFlight(), asyncio.Event()
    start(in_flight, 7, ended)
    ended.set()
    await in_flight.groups[7].task
    await asyncio.sleep(0)
    in_flight.take(7)
    assert not list(await in_flight.changed())
    assert not in_flight.groups
