"""Tensors, broadcasts and deltas to a real SGLang on the CPU: they arrive as by a folder, and leave nothing behind.

One server for all tests. Requests come one at a time, and every update flushes: the same weights give the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.engines.servers import RealServer, sglang_server
from tests.weights.transports.delta.processes import process_at
from tests.weights.transports.stumbling import stumbling

from rollfeed.config.engine import SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.errors import EngineError
from rollfeed.protocols import TransportContext
from rollfeed.types import SamplingParams, TensorUpdate
from rollfeed.weights.transports import TRANSPORTS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

PROMPT = np.array([100, 70, 71, 72, 73], np.int32)
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def server(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with sglang_server(policy, tmp_path_factory.mktemp("sglang")) as started:
        yield started


@pytest.fixture
async def receiver(tmp_path: Path) -> AsyncIterator[str]:
    async with process_at("weights", "--folder", str(tmp_path / "received")) as (_, address):
        yield address


@pytest.fixture
def engine_by(server: RealServer, receiver: str, policy: Path, tokenizer: Any) -> Callable[..., ServerEngine]:
    def make(transport: str, **changes: Any) -> ServerEngine:
        settings = SGLangSettings(workers=(server.address,), probe_timeout_seconds=120.0, **changes)
        context = TransportContext(
            kind="sglang", folder=None, checkpoint=policy, untied_head=False, receivers=(receiver,)
        )
        return ServerEngine(
            SGLang(settings), context_length=1000, tokenizer=tokenizer, transport=TRANSPORTS[transport](context)
        )

    return make


async def said(engine: ServerEngine) -> tuple[list[int], list[float]]:
    completion = await engine.generate(PROMPT, GREEDY, request_id="r")
    assert {span.policy_version for span in completion.version_spans} == {engine.policy_version}
    return completion.token_ids.tolist(), completion.logprobs.tolist()


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
@pytest.mark.parametrize("name", ["tensors", "nccl", "delta"])
async def test_new_weights_arrive_as_by_a_folder_and_the_old_ones_come_back_bit_for_bit(
    engine_by: Any, policy: Path, changed: Any, name: str, mode: str
) -> None:
    old, new = load_file(policy / "model.safetensors"), changed(1)
    async with engine_by("disk") as engine:
        first = engine.policy_version + 1
        await engine.apply(TensorUpdate(old, policy_version=first))
        before = await said(engine)
        await engine.apply(TensorUpdate(new, policy_version=first + 1))
        by_folder = await said(engine)
        await engine.apply(TensorUpdate(old, policy_version=first + 2))
    async with engine_by(name, weight_update=mode) as engine:
        for version in (first + 3, first + 5):  # a group is used again
            await engine.apply(TensorUpdate(new, policy_version=version))
            between = await said(engine)
            assert between == by_folder
            assert between[0] != before[0]
            await engine.apply(TensorUpdate(old, policy_version=version + 1))
            assert await said(engine) == before
        print(dict(engine.metrics())["weights_pause_seconds"])


@pytest.mark.parametrize("name", ["tensors", "nccl", "delta"])
async def test_a_request_goes_through_an_update(engine_by: Any, changed: Any, name: str) -> None:
    async with engine_by(name, weight_update="retract") as engine:
        first = engine.policy_version
        params = SamplingParams(max_new_tokens=900, min_new_tokens=900)  # about two seconds of this model
        task = asyncio.create_task(engine.generate(PROMPT, params, request_id="long"))
        while (await engine.load()).running == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await engine.apply(TensorUpdate(changed(2), policy_version=first + 1))
        completion = await task
        assert [span.policy_version for span in completion.version_spans] == [first, first + 1]
        assert len(completion.token_ids) == 900


async def test_a_broadcast_that_fails_in_its_middle_is_given_again(engine_by: Any, changed: Any) -> None:
    async with engine_by("disk") as engine:
        version = engine.policy_version + 1
        await engine.apply(TensorUpdate(changed(3), policy_version=version))
        by_folder = await said(engine)
        await engine.apply(TensorUpdate(changed(4), policy_version=version + 1))
    quick = {"probes_until_dead": 1, "probe_interval_seconds": 0.5, "max_tries": 1000}
    async with engine_by("nccl", **quick) as engine:
        update = await stumbling(engine._transport, TensorUpdate(changed(3), policy_version=version + 2))
        with pytest.raises(EngineError, match="a cable was pulled"):
            await engine.apply(update)
        assert await said(engine) == by_folder


async def test_a_session_that_a_publisher_died_in_is_ended_by_the_next(engine_by: Any, changed: Any) -> None:
    async with engine_by("tensors") as engine:
        await engine._http.ask(engine._dialect.settings.workers[0], "/begin_weight_update", {})
        await engine.apply(TensorUpdate(changed(5), policy_version=engine.policy_version + 1))
        await said(engine)


async def test_what_would_end_the_server_is_not_sent(engine_by: Any, policy: Path, server: RealServer) -> None:
    tensors = load_file(policy / "model.safetensors")
    wrong = {**tensors, "model.norm.weight": np.ones(3, np.float32)}
    for name in ("tensors", "nccl"):
        async with engine_by(name) as engine:
            version = engine.policy_version
            for given in (wrong, {}, {**tensors, "no.such.weight": np.ones(3, np.float32)}):
                with pytest.raises(EngineError, match="do not fit"):
                    await engine.apply(TensorUpdate(given, policy_version=version + 1))
            assert engine.policy_version == version
            await said(engine)
    assert server.told("/model_info")["weight_version"] == str(version)
