"""The thread and its commands, around a backend that only counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from rollfeed.engine.backends.replacement import writing
from rollfeed.engine.backends.requests import Request
from rollfeed.engine.local.loop import EngineThread
from rollfeed.errors import CheckpointError, EngineError, EngineProtocolError, EngineUnavailableError
from rollfeed.types import SamplingParams


class CountingBackend:
    """Takes requests and never finishes them; every failure is asked for."""

    policy_version = 0
    vocab_size = 10
    num_slots = 1
    precision = "none"

    def __init__(self, *, start_error: Exception | None = None, step_error: Exception | None = None) -> None:
        self.requests: list[Request] = []
        self.num_steps = 0
        self.num_closes = 0
        self.thread_names: set[str] = set()
        self._start_error = start_error
        self._step_error = step_error

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        return len(self.requests)

    def start(self) -> None:
        self.thread_names.add(threading.current_thread().name)
        if self._start_error is not None:
            raise self._start_error

    def close(self) -> None:
        self.thread_names.add(threading.current_thread().name)
        self.num_closes += 1

    def add(self, request: Request) -> None:
        self.requests.append(request)

    def step(self, between_tokens: Callable[[], None]) -> None:
        self.thread_names.add(threading.current_thread().name)
        self.num_steps += 1
        if self._step_error is not None:
            raise self._step_error

    def abort(self, chosen: Callable[[Request], bool]) -> None:
        self.requests = [request for request in self.requests if not chosen(request)]

    def fail_all(self, failure: Callable[[], EngineError]) -> None:
        for request in self.requests:
            request.fail(failure())
        self.requests.clear()

    def update_weights(self, tensors: Mapping[str, Any], policy_version: int) -> None:
        self.policy_version = policy_version


def make_request() -> Request:
    return Request(
        request_id="r",
        prompt_ids=np.array([1], np.int32),
        params=SamplingParams(max_new_tokens=5),
        eos_token_ids=(),
        context_length=10,
    )


async def until_ended(thread: EngineThread) -> None:
    """Wait for its last instruction: closing waits a second at most, for which a thread may not have its turn."""
    await asyncio.to_thread(thread._thread.join, 60.0)


async def test_an_idle_thread_takes_no_steps() -> None:
    backend = CountingBackend()
    thread = EngineThread(backend, name="t")
    await thread.start()
    for _ in range(20):
        await thread.call(lambda: None)
    assert backend.num_steps == 0
    await thread.close()


async def test_everything_happens_on_the_one_thread() -> None:
    backend = CountingBackend()
    thread = EngineThread(backend, name="t")
    await thread.start()
    thread.submit(make_request())
    await thread.call(lambda: backend.thread_names.add(threading.current_thread().name))
    while backend.num_steps < 3:
        await thread.call(lambda: None)
    await thread.close()
    assert backend.thread_names == {"t"}


async def test_a_paused_thread_takes_no_steps_but_carries_out_commands() -> None:
    backend = CountingBackend()
    thread = EngineThread(backend, name="t")
    await thread.start()
    await thread.set_paused(True)
    thread.submit(make_request())
    for _ in range(20):
        await thread.call(lambda: None)
    assert (backend.num_steps, backend.num_running) == (0, 1)
    await thread.close()


async def test_a_step_that_fails_fails_everything_that_was_handed_over() -> None:
    backend = CountingBackend(step_error=ValueError("boom"))
    thread = EngineThread(backend, name="t")
    await thread.start()
    await thread.set_paused(True)
    requests = [make_request() for _ in range(3)]
    for request in requests:
        thread.submit(request)
    await thread.set_paused(False)
    for request in requests:
        with pytest.raises(EngineError, match="ValueError: boom"):
            await asyncio.wrap_future(request.reply)
    with pytest.raises(EngineError, match="ValueError: boom"):
        thread.submit(make_request())
    await thread.close()


async def test_a_command_that_fails_answers_its_caller_and_ends_nothing_else() -> None:
    thread = EngineThread(CountingBackend(), name="t")
    await thread.start()

    def fail() -> None:
        raise ValueError("boom")

    with pytest.raises(EngineError, match="ValueError: boom"):
        await thread.call(fail)
    await thread.call(lambda: None)
    await thread.close()
    await thread.failed()


async def test_weights_that_were_written_half_end_the_thread() -> None:
    thread = EngineThread(CountingBackend(), name="t")
    await thread.start()
    failing = asyncio.create_task(thread.failed())

    def fail() -> None:
        with writing():
            raise MemoryError

    with pytest.raises(EngineError, match="could not be written wholly: MemoryError"):
        await thread.call(fail)
    with pytest.raises(EngineError, match="could not be written wholly: MemoryError"):
        await thread.call(lambda: None)
    with pytest.raises(EngineError, match="could not be written wholly: MemoryError"):
        await failing
    await thread.close()


async def test_a_refused_command_leaves_the_thread_running() -> None:
    thread = EngineThread(CountingBackend(), name="t")
    await thread.start()

    def refuse() -> None:
        raise EngineProtocolError("no")

    with pytest.raises(EngineProtocolError, match="no"):
        await thread.call(refuse)
    await thread.call(lambda: None)
    await thread.close()


async def test_a_start_that_fails_raises_its_error_and_leaves_no_thread() -> None:
    thread = EngineThread(CountingBackend(start_error=CheckpointError("bad weights")), name="start-fails")
    with pytest.raises(CheckpointError, match="bad weights"):
        await thread.start()
    await until_ended(thread)
    assert "start-fails" not in {other.name for other in threading.enumerate()}
    with pytest.raises(EngineUnavailableError):
        thread.submit(make_request())


async def test_closing_twice_is_fine_and_closes_the_backend_once() -> None:
    backend = CountingBackend()
    thread = EngineThread(backend, name="t")
    await thread.start()
    await thread.close()
    await thread.close()
    await until_ended(thread)
    assert backend.num_closes == 1


async def test_a_backend_is_closed_after_a_failure_too() -> None:
    backend = CountingBackend(step_error=RuntimeError("broken"))
    thread = EngineThread(backend, name="t")
    await thread.start()
    request = make_request()
    thread.submit(request)
    with pytest.raises(EngineError, match="broken"):
        await asyncio.wrap_future(request.reply)
    await thread.close()
    await until_ended(thread)
    assert backend.num_closes == 1


async def test_requests_behind_a_close_are_answered() -> None:
    backend = CountingBackend()
    thread = EngineThread(backend, name="t")
    await thread.start()
    requests = [make_request() for _ in range(50)]
    for request in requests:
        thread.submit(request)
    await thread.close()
    for request in requests:
        with pytest.raises(EngineUnavailableError):
            request.reply.result(timeout=60)


TORCH_SAYS = RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: not enough memory\nframe #0: x")


@pytest.mark.parametrize("error", [TORCH_SAYS, MemoryError()])
async def test_a_start_without_memory_is_one_line_with_the_remedy(error: Exception) -> None:
    thread = EngineThread(CountingBackend(start_error=error), name="t")
    with pytest.raises(EngineError) as caught:
        await thread.start()
    assert str(caught.value).startswith(f"the engine does not start: {type(error).__name__}")
    assert "lower engine.num_slots" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("error", "has_place"), [(TORCH_SAYS, False), (MemoryError(), False), (KeyError("x"), True)])
async def test_a_step_that_torch_fails_is_told_in_one_line(
    caplog: pytest.LogCaptureFixture, error: Exception, has_place: bool
) -> None:
    thread = EngineThread(CountingBackend(step_error=error), name="t")
    await thread.start()
    request = make_request()
    thread.submit(request)
    with pytest.raises(EngineError) as caught:
        await asyncio.wrap_future(request.reply)
    await thread.close()
    assert "\n" not in str(caught.value)
    assert [record.exc_info is not None for record in caplog.records] == [has_place]
