from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Engine
from rollfeed.testing import ScriptedEngine
from rollfeed.types import Completion, FolderUpdate, SamplingParams

MakeEngine = Callable[..., Engine]
PROMPT = np.array([72, 101, 108, 108, 111], np.int32)
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, seed=0, min_new_tokens=8)


async def answer(engine: Engine) -> Completion:
    return await engine.generate(PROMPT, GREEDY, request_id="r")


@pytest.fixture
def write_changed(tiny_llama: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write other weights than the checkpoint's, as one file or two shards."""

    def write(*, shards: int = 1, **changes: Any) -> Path:
        folder = tmp_path / f"version-{shards}"
        folder.mkdir()
        tensors = {name: tensor * 0.5 for name, tensor in load_file(tiny_llama / "model.safetensors").items()}
        tensors.update(changes)
        names = sorted(tensors)
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder
        weight_map = {}
        for shard in range(shards):
            part = {name: tensors[name] for name in names[shard::shards]}
            save_file(part, folder / f"model-{shard}.safetensors")
            weight_map |= dict.fromkeys(part, f"model-{shard}.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return write


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kernels", ["native", "torch"])
async def test_the_weights_of_a_folder_are_served_as_its_version(
    make_tiny_engine: MakeEngine, write_changed: Callable[..., Path], tiny_llama: Path, kernels: str, shards: int
) -> None:
    folder = write_changed(shards=shards)
    (folder / "config.json").write_bytes((tiny_llama / "config.json").read_bytes())
    async with make_tiny_engine(checkpoint=folder, kernels=kernels) as engine:
        expected = await answer(engine)
    async with make_tiny_engine(kernels=kernels) as engine:
        before = await answer(engine)
        await engine.apply(FolderUpdate(folder, policy_version=12))
        after = await answer(engine)
        assert engine.policy_version == 12
        await engine.apply(FolderUpdate(tiny_llama, policy_version=13))
        again = await answer(engine)
    assert after.logprobs.tolist() == expected.logprobs.tolist() != before.logprobs.tolist()
    assert [span.policy_version for span in after.version_spans] == [12]
    assert again.logprobs.tolist() == before.logprobs.tolist()


async def test_a_response_goes_on_with_the_weights_of_a_folder(
    make_tiny_engine: MakeEngine, write_changed: Callable[..., Path]
) -> None:
    params = SamplingParams(max_new_tokens=200, min_new_tokens=200, seed=1)
    async with make_tiny_engine() as engine:
        await engine.pause()
        task = asyncio.create_task(engine.generate(PROMPT, params, request_id="long"))
        await engine.apply(FolderUpdate(write_changed(), policy_version=1))
        await engine.resume()
        completion = await task
    assert completion.version_spans[-1].policy_version == 1
    assert completion.version_spans[-1].end == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": torch.ones(47)}, "its shape is (47,), the model's (48,)"),
        ({"model.norm.weight": torch.full((48,), torch.nan)}, "not finite"),
        ({"model.norm.weight": torch.full((48,), 1e300, dtype=torch.float64)}, "not finite as torch.float32"),
        ({"model.norm.weight": torch.ones(48).to(torch.float8_e5m2)}, "float8_e5m2, not floating point"),
    ],
)
async def test_weights_that_do_not_fit_change_nothing(
    make_tiny_engine: MakeEngine, write_changed: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    async with make_tiny_engine() as engine:
        before = await answer(engine)
        with pytest.raises(EngineProtocolError) as caught:
            await engine.apply(FolderUpdate(write_changed(**changes), policy_version=1))
        after = await answer(engine)
        assert engine.policy_version == 0
    assert message in str(caught.value)
    assert after.logprobs.tolist() == before.logprobs.tolist()


async def test_a_folder_that_cannot_be_read_changes_nothing(
    make_tiny_engine: MakeEngine, write_changed: Callable[..., Path], tmp_path: Path
) -> None:
    cut = write_changed()
    weights = cut / "model.safetensors"
    with safe_open(weights, framework="pt") as whole:
        assert len(whole.keys()) > 5
    weights.write_bytes(weights.read_bytes()[:-10])
    async with make_tiny_engine() as engine:
        before = await answer(engine)
        for folder in (cut, tmp_path / "gone"):
            with pytest.raises(EngineProtocolError, match=r"weights cannot be read from .*"):
                await engine.apply(FolderUpdate(folder, policy_version=1))
        after = await answer(engine)
        assert engine.policy_version == 0
    assert after.logprobs.tolist() == before.logprobs.tolist()


async def test_an_engine_that_is_closed_takes_no_folder(make_tiny_engine: MakeEngine, tiny_llama: Path) -> None:
    with pytest.raises(EngineUnavailableError):
        await make_tiny_engine().apply(FolderUpdate(tiny_llama, policy_version=1))


async def test_the_scripted_engine_takes_the_version(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        await engine.apply(FolderUpdate(tmp_path, policy_version=3))
        assert engine.policy_version == 3
