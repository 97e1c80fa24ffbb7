"""Faults at every point of every way by which weights reach servers: two embedded servers, and one that fails there.

No reply is of another version than its spans say, the update is over for those that have it, and the server that failed
comes back with the right version. Another way is an entry of ``WAYS``.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import load_file, save_file

from rollfeed.engine.client import ServerEngine
from rollfeed.protocols import TransportContext
from rollfeed.testing.fake_sglang import Fakes, serve_fake_sglang
from rollfeed.testing.held_port import hold_port
from rollfeed.types import Completion, SamplingParams, TensorUpdate
from rollfeed.weights.transports import TRANSPORTS

SERVE = ("--port", "0", "--threads", "1", "--num-slots", "8", "--context-length", "200", "--kernels", "torch")
PROMPTS = [np.array([40 + i, 50, 60], np.int32) for i in range(6)]
NUM_TOKENS = 24
LEAST_FAKE_ID, FAKE_END_ID = 1000, 2
PATIENCE = {
    "control_timeout_seconds": 6.0,
    "update_timeout_seconds": 6.0,
    "late_update_seconds": 0.3,
    "probe_interval_seconds": 0.2,
    "probe_timeout_seconds": 1.0,
    "concurrency": 16,
}
FAULTS: dict[str, dict[str, Any]] = {
    "dies": {"fault": "die"},
    "hangs": {"fault": "hang"},
    "refuses": {"fault": "status", "status": 400},
    "fails": {"fault": "status", "status": 500},
}
Until = Callable[[Callable[[], bool]], Awaitable[None]]


class Way(NamedTuple):
    """A transport, the policy of the servers, and the paths at which an update may go wrong."""

    transport: str
    weight_update: str
    points: tuple[str, ...]


_GATE = ("/pause_generation", "/continue_generation")
_SESSION = ("/begin_weight_update", "/end_weight_update")
WAYS = {
    "disk, retract": Way("disk", "retract", (*_GATE, "/model_info", "/update_weights_from_disk", "/flush_cache")),
    "disk, in place": Way("disk", "in_place", ("/update_weights_from_disk",)),
    "disk, abort": Way("disk", "abort", ("/update_weights_from_disk",)),
    "tensors": Way("tensors", "retract", (*_SESSION, "/update_weights_from_tensor")),
    "nccl": Way(
        "nccl",
        "retract",
        ("/init_weights_update_group", *_SESSION, "/update_weights_from_distributed"),
    ),
    "delta": Way("delta", "retract", ("/prepared_weights", "/prepare_weights_from_delta", "/update_weights_from_disk")),
}
CASES = [
    (name, point, fault)
    for name, way in WAYS.items()
    for point in way.points
    for fault in ("dies", "hangs", "refuses", "fails" if way.transport == "disk" else "loses its answer")
]


@pytest.fixture(scope="module")
def embedded(fork_rollfeed: Callable[..., Any], tiny_checkpoint: Path) -> Iterator[list[str]]:
    processes = [fork_rollfeed("serve", "engine", "--model", tiny_checkpoint, *SERVE) for _ in range(3)]
    try:
        yield [next(line for line in each.stdout if "serving" in line).split()[-1] for each in processes]
    finally:
        for process in processes:
            process.close()


@pytest.fixture(scope="module")
def versions(embedded: list[str]) -> Callable[[], int]:
    """The next version: the embedded servers outlive each case, and theirs never go down."""
    del embedded
    numbers = iter(range(1, 10_000))
    return lambda: next(numbers)


@pytest.fixture(scope="module")
def weights(tiny_checkpoint: Path) -> Callable[[int], TensorUpdate]:
    """Other weights for even and odd versions."""
    tensors = load_file(tiny_checkpoint / "model.safetensors")

    def of(version: int) -> TensorUpdate:
        factor = np.float32(1.0 if version % 2 else 0.4)
        return TensorUpdate({name: values * factor for name, values in tensors.items()}, policy_version=version)

    return of


@pytest.fixture(scope="module")
def folders(weights: Callable[[int], TensorUpdate], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The weights of even and of odd versions."""
    made = [tmp_path_factory.mktemp(name) for name in ("even", "odd")]
    for folder, version in zip(made, (2, 1), strict=True):
        save_file(dict(weights(version).tensors), folder / "model.safetensors")
    return made


@pytest.fixture(scope="module")
def said(embedded: list[str], folders: list[Path]) -> list[dict[int, list[int]]]:
    """What the servers answer with them."""
    answers = []
    for folder in folders:
        load(embedded[0], folder, 0)
        answers.append(greedy(embedded[0]))
    assert all(even != answers[1][first] for first, even in answers[0].items())
    return answers


def load(address: str, folder: Path, version: int) -> None:
    say(address, "/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(version)})


def say(address: str, path: str, body: Any) -> Any:
    """Ask a server; nobody is in between."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, content, {"Content-Type": "application/json"})
    with opener.open(request, timeout=300) as response:
        return json.loads(response.read())


def greedy(address: str) -> dict[int, list[int]]:
    """What a server answers to each prompt, by its first token."""
    sampling = {"max_new_tokens": NUM_TOKENS, "temperature": 0.0}
    bodies = {int(each[0]): {"input_ids": each.tolist(), "sampling_params": sampling} for each in PROMPTS}
    return {first: say(address, "/generate", body)["output_ids"] for first, body in bodies.items()}


class FailingFake:
    """SGLang's ways to the letter, without a model."""

    def __init__(self, fakes: Fakes) -> None:
        self.address, self._fakes = fakes.address, fakes

    async def fail(self, path: str, fault: str) -> None:
        await self._fakes.add_fault(path=path, **FAULTS[fault])

    @property
    def _met(self) -> dict[str, int]:
        met: dict[str, int] = self._fakes.servers[0].stats()["faults"]
        return met

    @property
    def num_met(self) -> int:
        return sum(self._met.values())

    async def mend(self) -> None:
        if "die" in self._met:
            await self._fakes.servers[0].restart()
        await self._fakes.clear_faults()


class FailingServer:
    """An embedded server behind a proxy at which requests to a path meet a fault.

    One that dies is there again with its first weights.
    """

    def __init__(self, server: str, checkpoint: Path) -> None:
        self._server, self._checkpoint = server, checkpoint
        self._path = self._fault = ""
        self.num_met = 0
        self._mended = asyncio.Event()

    async def __aenter__(self) -> FailingServer:
        self._held = hold_port()
        self._port = self._held.getsockname()[1]
        self._session = aiohttp.ClientSession()
        await self._listen()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._mended.set()
        await self._runner.cleanup()
        await self._session.close()
        self._held.close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def fail(self, path: str, fault: str) -> None:
        self._path, self._fault = path, fault

    async def mend(self) -> None:
        if self._fault == "dies":
            first = {"model_path": str(self._checkpoint), "weight_version": "0", "abort_all_requests": True}
            await asyncio.to_thread(say, self._server, "/continue_generation", {})
            await asyncio.to_thread(say, self._server, "/update_weights_from_disk", first)
            await self._listen()
        self._path = ""
        self._mended.set()

    async def _listen(self) -> None:
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        fault = self._fault if request.path == self._path else ""
        self.num_met += bool(fault)
        if fault == "hangs":
            await self._mended.wait()
        if fault == "dies":
            await self._die()
        if fault in ("refuses", "fails"):
            return web.json_response({"error": {"message": "injected"}}, status=FAULTS[fault]["status"])
        url, content = self._server + request.path_qs, await request.read()
        async with self._session.request(request.method, url, data=content) as response:
            body = await response.read()
        if fault == "loses its answer":
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=response.status, body=body, content_type=response.content_type)

    async def _die(self) -> None:
        for site in list(self._runner.sites):
            await site.stop()
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()


async def ask(engine: ServerEngine, name: str) -> list[Completion]:
    params = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0)
    asked = (engine.generate(each, params, request_id=f"{name}{i}") for i, each in enumerate(PROMPTS))
    return await asyncio.gather(*asked)


def check(completions: list[Completion], expected: dict[int, dict[int, list[int]]]) -> set[int]:
    """Refuse what an embedded server would not have said with the weights of that version; return the versions."""
    for prompt_ids, completion in zip(PROMPTS, completions, strict=True):
        spans, token_ids = completion.version_spans, completion.token_ids.tolist()
        assert spans[-1].end == len(token_ids)
        assert {span.policy_version for span in spans} <= set(expected)
        is_fake = max(token_ids) >= LEAST_FAKE_ID or token_ids == [FAKE_END_ID]
        if len(spans) == 1 and not is_fake:
            assert token_ids == expected[spans[0].policy_version][int(prompt_ids[0])]
    return {span.policy_version for completion in completions for span in completion.version_spans}


@pytest.mark.parametrize(("name", "point", "fault"), CASES)
async def test_a_fault_costs_one_server_for_a_while(
    name: str,
    point: str,
    fault: str,
    embedded: list[str],
    folders: list[Path],
    said: list[dict[int, list[int]]],
    versions: Callable[[], int],
    weights: Callable[[int], TensorUpdate],
    engine_at: Callable[..., ServerEngine],
    tiny_checkpoint: Path,
    until: Until,
) -> None:
    way = WAYS[name]
    context = TransportContext(kind="sglang", folder=None, checkpoint=tiny_checkpoint, untied_head=False)
    model = {"num_slots": 16, "median_length": 20.0, "max_length": NUM_TOKENS, "step_ms": 4.0}
    policy = {"weight_update": way.weight_update, "context_length": 200}
    async with AsyncExitStack() as stack:
        if way.transport == "disk":
            failing: FailingFake | FailingServer = FailingFake(
                await stack.enter_async_context(serve_fake_sglang(mode="time-model", time_model=model))
            )
        else:
            failing = await stack.enter_async_context(FailingServer(embedded[2], tiny_checkpoint))
        before, after = versions(), versions()
        for address in (*embedded, failing.address):
            await asyncio.to_thread(load, address, folders[before % 2], before)
        servers, transport = (*embedded[:2], failing.address), TRANSPORTS[way.transport](context)
        engine = await stack.enter_async_context(engine_at(*servers, transport=transport, **policy, **PATIENCE))
        expected = {before: said[before % 2], after: said[after % 2]}
        await failing.fail(point, fault)
        running = asyncio.create_task(ask(engine, "running"))
        await until(lambda: running.done() or engine.metrics()["requests_in_flight"] > 0)
        await engine.apply(weights(after))
        assert engine.policy_version == after
        assert check(await running, expected) <= {before, after}
        assert check(await ask(engine, "meanwhile"), expected) == {after}
        await until(lambda: failing.num_met > 0)  # when it is rebuilt, where it was late and the others were not waited
        await failing.mend()
        await until(lambda: engine.metrics()["live_workers"] == 3)
        told = [await asyncio.to_thread(say, each, "/model_info", None) for each in servers]
        assert {each["weight_version"] for each in told} == {str(after)}
        assert check(await ask(engine, "afterwards"), expected) == {after}
