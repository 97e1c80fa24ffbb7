"""The gate lets a bounded number of requests through, and none once it is closed."""

import asyncio

import numpy as np

from rollfeed.pipeline.groups import EngineGate
from rollfeed.testing import Fault, ScriptedEngine
from rollfeed.types import FinishKind, SamplingParams

PROMPT = np.array([1, 2, 3], np.int32)


async def ask(gate: EngineGate, count: int) -> list[asyncio.Task]:
    """Begin to ask, and let everything run as far as it comes by itself."""
    params = SamplingParams(max_new_tokens=4)
    tasks = [asyncio.create_task(gate.generate(PROMPT, params, request_id=f"r{number}")) for number in range(count)]
    for _ in range(20):
        await asyncio.sleep(0)
    return tasks


async def test_no_more_requests_than_allowed_are_at_the_engine_at_once() -> None:
    async with ScriptedEngine(fault_of=lambda request: Fault.HANG) as engine:
        gate = EngineGate(engine, max_requests_in_flight=3)
        tasks = await ask(gate, 10)
        assert gate.num_at_engine == 3
        assert [request.request_id for request in engine.requests] == ["r0", "r1", "r2"]
        await gate.abort_all()
        for _ in range(20):
            await asyncio.sleep(0)
        assert gate.num_at_engine == 3
        assert len(engine.requests) == 6
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_without_a_number_twice_what_the_engine_works_on_is_at_the_engine() -> None:
    async with ScriptedEngine(fault_of=lambda request: Fault.HANG, max_running_requests=2) as engine:
        gate = EngineGate(engine, max_requests_in_flight=None)
        tasks = await ask(gate, 10)
        assert len(engine.requests) == gate.num_at_engine == 4
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.num_at_engine == 0


async def test_a_closed_gate_answers_with_an_abort_and_asks_nobody_until_it_is_open_again() -> None:
    async with ScriptedEngine() as engine:
        gate = EngineGate(engine, max_requests_in_flight=3)
        gate.close()
        for task in await ask(gate, 5):
            completion = await task
            assert completion.finish_reason.kind is FinishKind.ABORT
            assert len(completion.token_ids) == len(completion.logprobs) == 0
            assert completion.prompt_tokens == 3
        assert not engine.requests
        gate.open()
        (task,) = await ask(gate, 1)
        assert (await task).finish_reason.kind is FinishKind.STOP
