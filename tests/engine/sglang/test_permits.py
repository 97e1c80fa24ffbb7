"""Permits under random aborts, cancellations, failures and put-backs, in virtual time."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import numpy as np
import pytest

from rollfeed.config.engine import SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.routing import belonging
from rollfeed.testing import CharTokenizer
from rollfeed.testing.fake_sglang import FakeSettings, TimeModelSettings, serve_fake_sglang
from rollfeed.testing.fake_sglang.settings import FakeMode
from rollfeed.testing.virtual_loop import run_in_virtual_time
from rollfeed.types import SamplingParams

MODEL = TimeModelSettings(num_slots=16, kv_budget_tokens=2_000, median_length=200.0, max_length=400)


async def disturb(engine: ServerEngine, tasks: list[asyncio.Task[Any]], random: Random) -> None:
    while not all(task.done() for task in tasks):
        await asyncio.sleep(random.uniform(0.0, 0.3))
        flights = sorted(engine._flights, key=lambda flight: flight.request_id)
        if not flights:
            continue
        flight = random.choice(flights)
        match random.randrange(4):
            case 0:
                await engine.abort(flight.request_id)
            case 1:
                random.choice(tasks).cancel()
            case 2:
                flight.interrupt()
            case 3 if flight.rid and flight.worker is not None:
                flight.is_put_back = True
                await engine._orphans.tell([flight.worker], flight.rid)


@pytest.mark.parametrize("seed", range(4))
def test_no_permit_is_lost_or_given_twice(seed: int) -> None:
    async def main() -> None:
        random = Random(seed)
        settings = FakeSettings(mode=FakeMode.TIME_MODEL, time_model=MODEL, keep_requests=0, num_workers=2)
        async with serve_fake_sglang(settings) as fakes:
            dialect = SGLang(SGLangSettings(workers=fakes.addresses, max_tries=3))
            async with ServerEngine(dialect, context_length=8192, tokenizer=CharTokenizer()) as engine:
                engine._permits.set_limit(24)

                async def ask(number: int) -> None:
                    prompt, params = np.array([number, 1, 2], np.int32), SamplingParams(max_new_tokens=400, seed=7)
                    for turn in range(3):
                        with belonging(session=f"s{number}"):
                            await engine.generate(prompt, params, request_id=f"r{number}.{turn}.")
                        await asyncio.sleep(random.uniform(0.0, 1.0))

                tasks = [asyncio.create_task(ask(number)) for number in range(60)]
                await disturb(engine, tasks, random)
                await asyncio.gather(*tasks, return_exceptions=True)
                assert engine.counters.put_back_requests > 0
                assert not engine._flights
                assert not engine._pool.num_flights
                assert engine._permits.num_taken == 0

    run_in_virtual_time(main())
