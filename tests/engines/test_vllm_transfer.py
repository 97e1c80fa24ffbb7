"""The four phases of a real vLLM on the CPU: start, buckets, finish and the version are its own.

What is not is how bytes get from one process to the other (``stand_ins_vllm``): handles to memory and NCCL need GPUs.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tests.engines.servers import RealServer, vllm_server
from tests.weights.transports.delta.processes import process_at

from rollfeed.config.engine import OpenAISettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import VLLM
from rollfeed.errors import EngineUnavailableError
from rollfeed.protocols import TransportContext
from rollfeed.types import SamplingParams, TensorUpdate
from rollfeed.weights import DiskTransport
from rollfeed.weights.transports import TRANSPORTS
from rollfeed.weights.transports.staging import Staging
from rollfeed.weights.transports.tensors import VLLMTensors

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

PROMPT = np.array([100, 70, 71, 72, 73], np.int32)
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def server(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    flags = ("--enable-scale-out", "--no-enable-prefix-caching", "--weight-transfer-config", '{"backend": "inline"}')
    more = {"PYTHONPATH": str(Path(__file__).parent / "stand_ins_vllm"), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with vllm_server(policy, tmp_path_factory.mktemp("vllm"), *flags, **more) as started:
        yield started


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have handles be the bytes themselves."""

    class Processor:
        uuid = "cpu"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: Processor)
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda bytes_B: (None, (bytes_B,)))


async def said(engine: ServerEngine) -> tuple[list[int], list[float]]:
    completion = await engine.generate(PROMPT, GREEDY, request_id="r")
    assert {span.policy_version for span in completion.version_spans} == {engine.policy_version}
    return completion.token_ids.tolist(), completion.logprobs.tolist()


@pytest.mark.usefixtures("inline")
async def test_new_weights_arrive_as_by_a_folder_and_the_old_ones_come_back_bit_for_bit(
    server: RealServer, policy: Path, tokenizer: Any, changed: Callable[[int], Mapping[str, Any]], monkeypatch: Any
) -> None:
    monkeypatch.setattr("rollfeed.weights.transports.staging._INLINE_BYTES", 200_000)
    old, new = load_file(policy / "model.safetensors"), changed(1)
    context = TransportContext(kind="openai", folder=None, checkpoint=policy, untied_head=True)
    staging = Staging(context)

    async def update(tensors: Any, version: int) -> VLLMTensors:
        buckets = await staging.buckets(TensorUpdate(tensors, policy_version=version))
        assert len(buckets) > 2
        return VLLMTensors(buckets, policy_version=version)

    settings = OpenAISettings(base_url=server.address, request_timeout_seconds=600.0, startup_timeout_seconds=120.0)
    transport = DiskTransport(checkpoint=policy, untied_head=True)
    async with ServerEngine(VLLM(settings), context_length=1000, tokenizer=tokenizer, transport=transport) as engine:
        await engine.apply(TensorUpdate(old, policy_version=1))
        before = await said(engine)
        await engine.apply(TensorUpdate(new, policy_version=2))
        by_folder = await said(engine)
        await engine.apply(TensorUpdate(old, policy_version=3))
        await engine._http.ask(server.address, "/start_weight_update", None)  # by somebody who died in it
        await engine.apply(await update(new, 4))
        between = await said(engine)
        assert between == by_folder
        assert between[0] != before[0]
        await engine.apply(await update(old, 5))
        assert await said(engine) == before
        assert server.told("/weight_info")["weight_version"] == "5"
        broken = await update(new, 6)
        handles = base64.b64encode(pickle.dumps({"cpu": (torch.zeros(3, dtype=torch.uint8),)})).decode()
        monkeypatch.setattr(
            "rollfeed.weights.transports.tensors.shared_bucket",
            lambda bucket: {
                "names": list(bucket.names),
                "dtype_names": bucket.dtype_names,
                "shapes": [list(shape) for shape in bucket.shapes],
                "tensor_sizes": bucket.sizes,
                "ipc_handles_pickled": handles,
            },
        )
        with pytest.raises(EngineUnavailableError, match="no worker has version 6"):
            await engine.apply(broken)
    assert server.told("/weight_info")["weight_version"] == "5"


async def test_deltas_arrive_as_by_a_folder_and_the_old_weights_come_back_bit_for_bit(
    server: RealServer, policy: Path, tokenizer: Any, changed: Callable[[int], Mapping[str, Any]], tmp_path: Path
) -> None:
    old, new = load_file(policy / "model.safetensors"), changed(1)
    settings = OpenAISettings(base_url=server.address, request_timeout_seconds=600.0, startup_timeout_seconds=120.0)
    async with process_at("weights", "--folder", str(tmp_path / "received")) as (_, receiver):
        context = TransportContext(
            kind="openai", folder=None, checkpoint=policy, untied_head=True, receivers=(receiver,)
        )
        said_by: dict[str, list[Any]] = {}
        for name, first in (("disk", 11), ("delta", 21)):
            transport = TRANSPORTS[name](context)
            engine = ServerEngine(VLLM(settings), context_length=1000, tokenizer=tokenizer, transport=transport)
            async with engine:
                for version, tensors in enumerate((old, new, old), start=first):
                    await engine.apply(TensorUpdate(tensors, policy_version=version))
                    said_by.setdefault(name, []).append(await said(engine))
    assert said_by["delta"] == said_by["disk"]
    assert said_by["delta"][0] == said_by["delta"][2]
    assert said_by["delta"][0][0] != said_by["delta"][1][0]
    assert server.told("/weight_info")["weight_version"] == "23"
