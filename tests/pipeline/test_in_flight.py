"""Groups in flight, and which of them have ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rollfeed.pipeline.context import InFlight
from rollfeed.protocols import RunningGroup
from rollfeed.testing import make_group
from rollfeed.types import Group, SampleStatus


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


def test_the_rest_of_a_group_is_that_of_its_members_now() -> None:
    group = make_group([1.0, 0.0])
    running = RunningGroup.of(replace(group, rollouts=()), n_samples_per_prompt=2, policy_version=0)
    assert running.rest().rollouts == ()
    running.rollouts[1] = group.rollouts[1]
    assert running.rest().rollouts[1] is group.rollouts[1]
    assert running.rest() is running.rest()
    aborted = replace(group.rollouts[0].samples[0], status=SampleStatus.ABORTED)
    running.rollouts[0] = replace(group.rollouts[0], samples=(aborted,))
    assert running.rest().rollouts == tuple(running.rollouts)
    failed = replace(aborted, status=SampleStatus.FAILED)
    running.rollouts[0] = replace(group.rollouts[0], samples=(failed,))
    assert not running.rest().rollouts[0].samples
