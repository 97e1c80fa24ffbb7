"""Deltas all the way into engines: a real `rollfeed serve engine`, by itself and beside a receiver, and fakes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.held_ports import held_port
from tests.weights.transports.delta.processes import process_at, receiver_at

from rollfeed.app import build_engine, load_model
from rollfeed.config import EngineSettings
from rollfeed.errors import ConfigError, EngineProtocolError
from rollfeed.testing.fake_sglang import serve_fake_sglang
from rollfeed.types import FolderUpdate, SamplingParams, TensorUpdate

PROBES = {"probe_interval_seconds": 0.2, "probe_timeout_seconds": 60.0}
TEXTS = [np.arange(3 + start, 40 + start, dtype=np.int32) for start in range(3)]


def engine_for(checkpoint: Path, **sglang: Any) -> Any:
    settings = EngineSettings.model_validate(
        {"context_length": 128, "sglang": {"weights_transport": "delta", **PROBES, **sglang}}
    )
    return build_engine(load_model(str(checkpoint), with_weights=False), settings)


async def said_by(engine: Any) -> tuple[list[float], list[int]]:
    """Log-probabilities of texts, and what is sampled greedily."""
    (scored,) = (await engine.score(TEXTS)).values()
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    completion = await engine.generate(TEXTS[0], params, request_id="greedy")
    assert {span.policy_version for span in completion.version_spans} == {engine.policy_version}
    return scored.tolist(), completion.token_ids.tolist()


async def test_weights_come_by_delta_as_by_folder_and_go_back_bit_for_bit(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    first = load_file(tiny_checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    other = {name: each + 0.3 * torch.randn(each.shape, generator=generator) for name, each in first.items()}
    serving = process_at("engine", "--model", str(tiny_checkpoint), "--threads", "1")
    async with serving as (_, address), process_at("weights", "--folder", str(tmp_path / "r")) as (process, receiver):
        async with engine_for(tiny_checkpoint, workers=[address]) as engine:
            before = await said_by(engine)
            await engine.apply(TensorUpdate(other, policy_version=1))
            changed = await said_by(engine)
            assert np.abs(np.subtract(before[0], changed[0])).mean() > 0.1
            assert before[1] != changed[1]
            one = {**other, "model.norm.weight": other["model.norm.weight"] + 1e-3}
            await engine.apply(TensorUpdate(one, policy_version=2))
            assert 0 < engine.metrics()["weights_bytes"] < 10_000
            await engine.apply(TensorUpdate(first, policy_version=3))
            assert await said_by(engine) == before
        async with engine_for(tiny_checkpoint, workers=[address], weights_receivers=[receiver]) as engine:
            await engine.apply(TensorUpdate(first, policy_version=4))
            await engine.apply(TensorUpdate(other, policy_version=5))
            assert await said_by(engine) == changed
            folder = next((tmp_path / "r").glob("version-000005-*[!s]"))
            await engine.apply(FolderUpdate(folder, policy_version=6))
            assert await said_by(engine) == changed
            process.kill()
            with pytest.raises(EngineProtocolError, match=r"version 7.*is `rollfeed serve weights` running"):
                await engine.apply(TensorUpdate(first, policy_version=7))
            assert engine.policy_version == 6
            assert await said_by(engine) == changed


async def test_requests_go_on_while_the_server_prepares(tiny_checkpoint: Path) -> None:
    first = load_file(tiny_checkpoint / "model.safetensors")
    params = SamplingParams(max_new_tokens=60, min_new_tokens=60)
    completions = []

    async def ask(engine: Any) -> None:
        while engine.policy_version < 4:
            completions.append(await engine.generate(TEXTS[0], params, request_id=f"r{len(completions)}"))

    async with (
        process_at("engine", "--model", str(tiny_checkpoint), "--threads", "1") as (_, address),
        engine_for(tiny_checkpoint, workers=[address], weight_update="in_place") as engine,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(4):
            tasks.create_task(ask(engine))
        for version in range(1, 5):
            shifted = {name: each + 1e-4 * version for name, each in first.items()}
            await engine.apply(TensorUpdate(shifted, policy_version=version))
    assert all(len(each.token_ids) == 60 for each in completions)
    spans = [span for each in completions for span in each.version_spans]
    assert {span.policy_version for span in spans} >= set(range(4))


def test_receivers_without_delta_are_refused(tiny_checkpoint: Path) -> None:
    table = {"workers": ["http://a:1"], "weights_receivers": ["http://a:2"], "weights_transport": "disk"}
    with pytest.raises((ConfigError, ValueError), match="are for weights_transport = 'delta', not 'disk'"):
        engine_for(tiny_checkpoint, **table)


def test_vllm_needs_a_receiver(tiny_checkpoint: Path) -> None:
    settings = EngineSettings.model_validate({"openai": {"base_url": "http://a:1", "weights_transport": "delta"}})
    with pytest.raises(ConfigError, match=r"engine\.openai\.weights_receivers is empty"):
        build_engine(load_model(str(tiny_checkpoint), with_weights=False), settings)


async def test_a_receiver_that_is_gone_costs_its_server_until_it_is_back(tmp_path: Path, tiny_checkpoint: Path) -> None:
    first = load_file(tiny_checkpoint / "model.safetensors")
    roots = {"127.0.0.1": tmp_path / "one", "localhost": tmp_path / "other"}
    async with serve_fake_sglang(mode="scripted", num_workers=2) as fakes, AsyncExitStack() as stack:
        port = stack.enter_context(held_port())
        workers = [address.replace("127.0.0.1", host) for address, host in zip(fakes.addresses, roots, strict=True)]
        one = await stack.enter_async_context(receiver_at(roots["127.0.0.1"]))
        async with receiver_at(roots["localhost"], port=port):
            receivers = [one, f"http://localhost:{port}"]
            engine = engine_for(tiny_checkpoint, workers=workers, weights_receivers=receivers)
            await stack.enter_async_context(engine)
            await engine.apply(TensorUpdate(first, policy_version=1))
            assert engine.metrics()["live_workers"] == 2
        for version in (2, 3):
            await engine.apply(TensorUpdate(first, policy_version=version))
            assert engine.metrics()["live_workers"] == 1
        versions = [(await fakes.stats(worker))["weight_version"] for worker in (0, 1)]
        assert versions == ["3", "1"]
        async with receiver_at(roots["localhost"], port=port), asyncio.timeout(60):
            while engine.metrics()["live_workers"] < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await fakes.stats(1))["weight_version"] == "3"
        for host, root in roots.items():
            assert [path.name[:14] for path in sorted(root.glob("version-*[!s]"))][-1] == "version-000003", host
