"""The limit finds the knee of simulated engines; permits follow it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rollfeed.config.servers import Routing
from rollfeed.engine.client.concurrency import (
    Permits,
    memory_room,
    room_at,
    too_many,
)
from rollfeed.engine.client.counters import Counters
from rollfeed.engine.client.flights import Flight, FlightAbortedError, Worker
from rollfeed.engine.client.monitor import Monitor
from rollfeed.engine.client.replies import ServerLoad
from rollfeed.engine.client.workers import ServerPool
from rollfeed.routing import AdaptiveLimit, Throughput, Window
from rollfeed.testing.virtual_loop import run_in_virtual_time
from rollfeed.types import SamplingParams


def graphs_to_256(running: int) -> float:
    """A server that captured its graphs up to a batch of 256; rates as measured at 256 and 1,024."""
    if running <= 256:
        return 66_800 * (running / (60 + running)) * (316 / 256)
    return 66_800 * 0.46 * (1 + 0.2 * 256 / running)


def slots(number: int) -> Callable[[int], float]:
    """An engine of so many slots; a step of b requests takes 8 + 0.05 b milliseconds."""
    return lambda running: 1e3 * min(running, number) / (8 + 0.05 * min(running, number))


def settle(
    rate: Callable[[int], float], *, capacity: int = 10**6, noise: float = 0.0, windows: int = 200
) -> list[float]:
    """Return the share of the best possible rate in the last windows."""
    random, limit = Random(1), AdaptiveLimit(num_workers=1, ceiling=1024)
    reached = []
    for _ in range(windows):
        running = min(limit.limit, capacity)
        now = rate(running)
        reached.append(now)
        measured = now * random.uniform(1 - noise, 1 + noise)
        limit.observe(Window(measured, limit.limit // 2, running, limit.limit - running, limit.limit))
    best = max(rate(min(each, capacity)) for each in range(1, 1025))
    return [each / best for each in reached[windows // 4 :]]


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.2])
def test_a_cliff_is_found_and_kept_away_from(noise: float) -> None:
    shares = settle(graphs_to_256, noise=noise)
    assert np.mean(shares) > 0.95


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.2])
def test_all_slots_are_used_and_few_requests_queue(noise: float) -> None:
    limit = AdaptiveLimit(num_workers=1, ceiling=1024)
    random = Random(2)
    for _ in range(100):
        running = min(limit.limit, 96)
        measured = slots(96)(running) * random.uniform(1 - noise, 1 + noise)
        limit.observe(Window(measured, limit.limit, running, limit.limit - running, limit.limit))
    assert 96 <= limit.limit <= 110


def test_one_bad_window_does_not_end_the_doubling() -> None:
    limit = AdaptiveLimit(num_workers=1, ceiling=1024)
    for index in range(12):
        rate = 1.0 if index in (3, 7) else float(limit.limit)
        limit.observe(Window(rate, limit.limit // 4, limit.limit, 0, limit.limit))
    assert limit.limit >= 512


def test_a_rate_that_only_grows_is_followed_to_the_ceiling() -> None:
    assert np.mean(settle(slots(4096), windows=400)) > 0.95


def test_what_is_not_asked_for_teaches_nothing() -> None:
    limit = AdaptiveLimit(num_workers=2, ceiling=1024)
    for _ in range(20):
        limit.observe(Window(tokens_per_second=10.0, num_requests=3, running=3, waiting=0, in_flight=3))
    assert limit.limit == 128


def test_a_refusal_lowers_the_limit_once_a_window() -> None:
    limit = AdaptiveLimit(num_workers=1, ceiling=1024)
    limit.observe(Window(0.0, 0, 0, 0, 0))
    for _ in range(5):
        limit.refused()
    assert limit.limit == 48


def test_the_limit_follows_the_workers_that_are_alive() -> None:
    limit = AdaptiveLimit(num_workers=4, ceiling=1024)
    limit.set_num_workers(3)
    assert limit.limit == 192
    limit.set_num_workers(0)
    assert limit.limit == 192
    limit.set_num_workers(4)
    assert limit.limit == 256


def test_the_ceiling_holds() -> None:
    limit = AdaptiveLimit(num_workers=8, ceiling=10)
    assert limit.limit == 10


def flight() -> Flight:
    params = SamplingParams(max_new_tokens=1)
    return Flight(request_id="r", prompt_ids=np.zeros(1, np.int32), params=params)


async def test_permits_are_given_in_order_and_never_more_than_the_limit() -> None:
    permits = Permits(1)
    order: list[int] = []

    async def take(number: int) -> None:
        await permits.acquire(flight())
        order.append(number)
        assert permits.num_taken <= permits.limit

    tasks = [asyncio.create_task(take(number)) for number in range(4)]
    await asyncio.sleep(0)
    assert order == [0]
    permits.set_limit(3)
    await asyncio.gather(*tasks[:3])
    permits.release()
    await tasks[3]
    assert order == [0, 1, 2, 3]


async def test_a_cancelled_or_aborted_waiter_takes_no_permit() -> None:
    permits = Permits(1)
    await permits.acquire(flight())
    waiting, aborted = flight(), flight()
    cancelled = asyncio.create_task(permits.acquire(waiting))
    refused = asyncio.create_task(permits.acquire(aborted))
    last = asyncio.create_task(permits.acquire(flight()))
    await asyncio.sleep(0)
    permits.release()  # goes to the first, which is cancelled before it runs
    cancelled.cancel()
    aborted.abort()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    with pytest.raises(FlightAbortedError):
        await refused
    await last
    assert permits.num_taken == 1


async def test_throughput_counts_requests_that_began_after_the_limit_changed() -> None:
    throughput = Throughput()
    now = asyncio.get_running_loop().time()
    for _ in range(40):
        throughput.note(began=now - 2.0, ended=now, num_tokens=1000)
    throughput.restart(changed=True)
    assert throughput.take(64) is None
    for _ in range(40):
        throughput.note(began=now - 2.0, ended=now, num_tokens=1000)
    assert throughput.take(64) is None
    later = asyncio.get_running_loop().time() + 1.0
    for _ in range(8):
        throughput.note(began=later, ended=later + 2.0, num_tokens=100)
    assert throughput.take(64) == 64 * 50.0
    throughput.restart(changed=False)
    for _ in range(8):
        throughput.note(began=later, ended=later + 1.0, num_tokens=100)
    assert throughput.take(64) == 64 * 100.0


@pytest.mark.parametrize(
    ("load", "room"),
    [
        (ServerLoad(64, 0), math.inf),
        (ServerLoad(64, 0, kv_use=0.2), math.inf),  # too little to tell how much more fits
        (ServerLoad(64, 0, kv_use=0.5), 121.6),
        (ServerLoad(64, 0, kv_use=1.0), 60.8),
        (ServerLoad(48, 16), 51.0),
        (ServerLoad(48, 16, kv_use=1.0), 45.6),
        (ServerLoad(128, 0, kv_use=1.0), 60.8),  # half of those that run are somebody else's
        (ServerLoad(0, 64, kv_use=1.0), 1.0),
    ],
)
def test_a_server_has_room_for_what_runs_and_what_its_memory_holds(load: ServerLoad, room: float) -> None:
    assert room_at(load, 64) == pytest.approx(room)


def test_the_memory_of_servers_is_counted_together() -> None:
    one, idle = ServerLoad(60, 4, kv_use=1.0), ServerLoad(0, 0, kv_use=0.0)
    assert memory_room([one], 64) == pytest.approx(60 * 0.95)
    assert memory_room([one, idle], 64) == pytest.approx(2 * 60 * 0.95)  # the idle one holds as much
    assert memory_room([one, ServerLoad(60, 0)], 124) == math.inf  # one does not say


@pytest.mark.parametrize(("num_flights", "room"), [(0, 45.0), (10, 55.0), (50, 95.0), (100, 190.0)])
def test_what_is_free_beside_requests_of_others_is_room(num_flights: int, room: float) -> None:
    assert memory_room([ServerLoad(50, 0, kv_use=0.5)], num_flights) == pytest.approx(room)


def test_memory_that_others_fill_leaves_a_share_of_it() -> None:
    assert memory_room([ServerLoad(40, 60, kv_use=0.95)], 10) == pytest.approx(4.0)
    assert memory_room([ServerLoad(40, 60, kv_use=0.95)], 0) == 0.0


async def test_what_servers_have_put_back_is_counted_from_look_to_look(monitored: Any) -> None:
    monitor, worker, told = monitored
    full = ServerLoad(8, 2, kv_use=1.0)
    for load, num_preempted in (
        (full._replace(total_preempted=7), 0),  # before this engine
        (full._replace(total_preempted=9), 2),
        (full, 0),  # not asked
        (full._replace(total_preempted=12), 3),
        (full._replace(total_preempted=1), 0),  # started again
        (full._replace(num_preempted=4), 4),
        (full._replace(num_preempted=4, total_preempted=2), 4),
    ):
        told.append(load)
        await monitor._look_at(worker)
        assert worker.load.num_preempted == num_preempted


async def test_an_abort_of_all_leaves_the_limit_as_it_was(monitored: Any) -> None:
    monitor, worker, told = monitored
    limit, permits, throughput = AdaptiveLimit(num_workers=1, ceiling=512), Permits(50), Throughput()
    told.append(ServerLoad(60, 4, kv_use=1.0))
    await monitor._look_at(worker)
    monitor._steer(limit, permits, throughput)
    assert permits.limit == 50
    worker.flights.update(flight() for _ in range(32))
    monitor._steer(limit, permits, throughput)
    assert permits.limit == 28


@pytest.fixture
def monitored() -> tuple[Monitor, Worker, list[ServerLoad]]:
    """What watches one server, which says what is told next."""
    told: list[ServerLoad] = []

    async def load(_address: str) -> ServerLoad:
        return told.pop()

    dialect = SimpleNamespace(settings=None, load=load)
    pool = ServerPool(router=None, counters=Counters(), routing=Routing.PREFIX)
    worker = pool.add("http://127.0.0.1:1")
    monitor: Any = Monitor(pool=pool, router=None, dialect=cast(Any, dialect), weights=cast(Any, None))
    return monitor, worker, told


def flights_at(*num_tokens: int) -> list[Flight]:
    made = [flight() for _ in num_tokens]
    for number, (each, known) in enumerate(zip(made, num_tokens, strict=True)):
        each.number, each.answer = number, cast(Any, SimpleNamespace(num_tokens=known))
    return made


def test_the_youngest_leave_a_server_that_computes_again_what_does_not_fit() -> None:
    thrashing = ServerLoad(6, 4, kv_use=0.95, num_preempted=3)
    flights = flights_at(50, 3, 40, 30, 0, 20, 10, 60, 70, 0)
    assert [each.number for each in too_many(thrashing, flights, now=0.0)] == [9, 4, 1, 6, 5]
    flights[4].is_put_back = True  # it is leaving already
    assert 4 not in {each.number for each in too_many(thrashing, flights, now=0.0)}
    for each in flights[:9]:
        each.is_put_back = True
    assert not too_many(thrashing, flights, now=0.0)  # enough are leaving: the last one stays
    for calm in (thrashing._replace(num_preempted=0), thrashing._replace(waiting=0, running=10)):
        assert not too_many(calm, flights, now=0.0)
    assert not too_many(ServerLoad(1, 0, kv_use=1.0, num_preempted=1), flights_at(5), now=0.0)  # it makes progress


def test_what_is_not_streamed_is_younger_the_later_it_was_sent() -> None:
    flights = flights_at(0, 0, 0)
    for each, sent in zip(flights, (3.0, 1.0, 2.0), strict=True):
        each.sent = sent
    load = ServerLoad(1, 2, tokens_per_second=50.0, kv_use=0.95, num_preempted=1)
    assert [each.number for each in too_many(load, flights, now=4.0)] == [0, 2]


async def test_turns_of_conversations_that_have_begun_come_first() -> None:
    permits, order = Permits(1), list[str]()
    for session in ("a", "b"):
        permits.arrived(flight(), session)
    await permits.acquire(flight())

    async def take(name: str, session: str | None) -> None:
        waiting = flight()
        permits.arrived(waiting, session)
        await permits.acquire(waiting)
        order.append(name)
        permits.release()

    names = {"new": None, "b, second turn": "b", "a, second turn": "a", "newer": None, "a1, first turn": "a1"}
    tasks = [asyncio.create_task(take(name, session)) for name, session in names.items()]
    await asyncio.sleep(0)
    permits.release()
    await asyncio.gather(*tasks)
    assert order == ["a, second turn", "b, second turn", "new", "newer", "a1, first turn"]


async def turn(permits: Permits, session: str) -> None:
    taken = flight()
    permits.arrived(taken, session)
    await permits.acquire(taken)
    permits.ended(taken, session)
    permits.release()


def test_conversations_between_two_turns_keep_others_from_beginning_for_a_while() -> None:
    async def main() -> None:
        permits, passed = Permits(2), list[str]()
        permits.hold_seconds = 5.0
        for _ in range(50):  # tools are quick
            await turn(permits, "earlier")
        await asyncio.sleep(6.0)

        async def take(session: str) -> Flight:
            taken = flight()
            permits.arrived(taken, session)
            await permits.acquire(taken)
            passed.append(session)
            return taken

        first, second = await take("a"), await take("b")
        waiting = [asyncio.create_task(take(session)) for session in ("c", "d")]
        for each, session in ((first, "a"), (second, "b")):
            permits.ended(each, session)
            permits.release()
        await asyncio.sleep(0)
        assert passed == ["a", "b", "c"]  # one may always begin: the others may have ended
        await asyncio.sleep(4.0)
        await take("a")
        assert passed == ["a", "b", "c", "a"]
        await asyncio.sleep(2.0)  # nobody waits for b any longer
        permits.ended(first, "a")
        permits.release()
        await asyncio.sleep(0)
        assert passed == ["a", "b", "c", "a"]
        await asyncio.sleep(6.0)
        permits.set_limit(2)  # as after every look at the servers
        await asyncio.gather(*waiting)
        assert passed[-1] == "d"
        assert permits.num_taken == 2

    run_in_virtual_time(main())


def test_conversations_of_one_turn_cost_no_places() -> None:
    async def main() -> None:
        permits = Permits(2)
        permits.hold_seconds = 10.0
        for number in range(20):
            await turn(permits, f"s{number}")
            await asyncio.sleep(1.0)
        async with asyncio.timeout(60.0):
            for _ in range(2):
                late = flight()
                permits.arrived(late, None)
                await permits.acquire(late)
        assert permits.num_taken == 2

    run_in_virtual_time(main())


@pytest.mark.parametrize(
    ("tool_seconds", "keeps"),
    [([1.0], True), ([60.0], False), ([1.0, 1.0, 60.0], True), ([1.0, 60.0], False), ([], True)],
)
def test_conversations_keep_their_places_only_while_tools_are_mostly_quick(
    tool_seconds: list[float], keeps: bool
) -> None:
    async def main() -> None:
        permits = Permits(1)
        permits.hold_seconds = 10.0
        for seconds in 20 * tool_seconds:
            await turn(permits, "a")
            await asyncio.sleep(seconds)
        await turn(permits, "a")
        await permits.acquire(flight())
        late = flight()
        permits.arrived(late, None)
        permits.set_limit(2)
        task = asyncio.create_task(permits.acquire(late))
        await asyncio.sleep(0)
        assert task.done() is not keeps
        permits.set_limit(3)
        await task

    run_in_virtual_time(main())
