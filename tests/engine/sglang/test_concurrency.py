"""The limit finds the knee of simulated engines; permits follow it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from rollfeed.engine.client.concurrency import AdaptiveLimit, Permits, Throughput, Window, room_at
from rollfeed.engine.client.flights import Flight, FlightAbortedError
from rollfeed.engine.client.replies import ServerLoad
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
    return Flight(request_id="r", prompt_ids=np.zeros(1, np.int32), params=params, images=())


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
        (ServerLoad(64, 0, kv_use=0.45), 128.0),
        (ServerLoad(64, 0, kv_use=1.0), 57.6),
        (ServerLoad(48, 16), 51.0),
        (ServerLoad(48, 16, kv_use=1.0), 51.0),
        (ServerLoad(128, 0, kv_use=1.0), 57.6),  # half of those that run are somebody else's
        (ServerLoad(0, 64, kv_use=1.0), 1.0),
    ],
)
def test_a_server_has_room_for_what_runs_and_what_its_memory_holds(load: ServerLoad, room: float) -> None:
    assert room_at(load, 64) == pytest.approx(room)
