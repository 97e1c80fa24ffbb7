"""Checkpoints whose tensors are not exactly the model's."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.engine.local.test_weights_from_disk import PROMPT

from rollfeed.errors import CheckpointError, EngineProtocolError
from rollfeed.protocols import Engine
from rollfeed.types import Completion, FolderUpdate, SamplingParams, TensorUpdate

MakeEngine = Callable[..., Engine]
WEIGHTS = "model.safetensors"
HEAD = {"v_head.summary.weight": torch.zeros(1, 48), "v_head.summary.bias": torch.zeros(1)}


async def answer(engine: Engine) -> Completion:
    params = SamplingParams(max_new_tokens=4, temperature=0.0, seed=0)
    return await engine.generate(PROMPT, params, request_id="r")


def copy_of(checkpoint: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object], **config: Any) -> Path:
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("kernels", ["native", "torch"])
async def test_a_value_head_is_not_loaded_and_told_of_once(
    make_tiny_engine: MakeEngine,
    tiny_llama: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kernels: str,
) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    folder = copy_of(tiny_llama, tmp_path / "model", lambda tensors: tensors.update(HEAD | old))
    async with make_tiny_engine(kernels=kernels) as engine:
        expected = await answer(engine)
    async with make_tiny_engine(checkpoint=folder, kernels=kernels) as engine:
        found = await answer(engine)
        await engine.apply(FolderUpdate(folder, policy_version=1))
        again = await answer(engine)
    assert found.logprobs.tolist() == again.logprobs.tolist() == expected.logprobs.tolist()
    told = [record.message for record in caplog.records if "v_head" in record.message]
    assert len(told) == 1
    assert told[0].startswith(f"{folder}: not loaded, since the model has no such tensors: v_head.summary.bias, ")
    assert told[0].endswith(" v_head.summary.weight (2 in all)")


async def test_an_unknown_name_in_a_folder_is_an_error_where_one_of_the_models_is_missing(
    make_tiny_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["module.model.norm.weight"] = tensors.pop("model.norm.weight") + 1.0

    folder = copy_of(tiny_llama, tmp_path / "renamed", rename)
    async with make_tiny_engine() as engine:
        before = await answer(engine)
        with pytest.raises(EngineProtocolError, match=r"'model\.norm\.weight' is missing.*'module\.model\.norm"):
            await engine.apply(FolderUpdate(folder, policy_version=1))
        with pytest.raises(EngineProtocolError, match=r"'v_head\.summary\.weight': the model has no weight"):
            await engine.apply(TensorUpdate(HEAD, policy_version=1))
        assert engine.policy_version == 0
        assert (await answer(engine)).logprobs.tolist() == before.logprobs.tolist()


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), {}, r"weight 'model\.norm\.weight' is missing \(1 are\)"),
        (lambda tensors: None, {"vocab_size": 130}, r"its shape is \(128, 48\), the model's \(130, 48\): config\.json"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}),
            {},
            "its values are I8, not floating point",
        ),
        (lambda tensors: None, {"hidden_size": "48"}, r"config\.json has a value that is not a model's"),
        (lambda tensors: None, {"num_attention_heads": 0}, r"config\.json has a value that is not a model's"),
    ],
)
def test_what_is_not_the_models_is_refused_before_the_start(
    make_tiny_engine: MakeEngine, tiny_llama: Path, tmp_path: Path, change: Any, config: dict[str, Any], message: str
) -> None:
    folder = copy_of(tiny_llama, tmp_path / "model", change, **config)
    with pytest.raises(CheckpointError, match=message):
        make_tiny_engine(checkpoint=folder)


def test_a_configuration_without_a_size_says_which(
    make_tiny_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    folder = copy_of(tiny_llama, tmp_path / "model", lambda tensors: None)
    values = json.loads((folder / "config.json").read_text())
    del values["hidden_size"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"config\.json has no hidden_size"):
        make_tiny_engine(checkpoint=folder)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_two_heads_that_differ_are_not_tied_as_in_transformers(
    make_tiny_engine: MakeEngine,
    tiny_llama: Path,
    tmp_path: Path,
    load_reference: Callable[[Path], Any],
    reference_logprobs: Callable[..., Any],
    kernels: str,
) -> None:
    folder = copy_of(tiny_llama, tmp_path / "model", lambda tensors: None, tie_word_embeddings=True)

    async def run() -> Completion:
        async with make_tiny_engine(checkpoint=folder, kernels=kernels) as engine:
            return await answer(engine)

    completion = asyncio.run(run())
    [expected] = reference_logprobs(load_reference(folder), [PROMPT], [completion])
    torch.testing.assert_close(torch.tensor(completion.logprobs), torch.tensor(expected), atol=1e-4, rtol=0)


def test_models_that_transformers_computes_are_checked_too(
    make_tiny_engine: MakeEngine, save_tiny: Callable[[Any], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpt2 = save_tiny(transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=2, n_positions=256))
    lacking = copy_of(gpt2, tmp_path / "a", lambda tensors: tensors.pop("transformer.ln_f.weight"))
    with pytest.raises(CheckpointError, match=r"weight 'transformer\.ln_f\.weight' is missing \(1 are\)"):
        make_tiny_engine(checkpoint=lacking)
    make_tiny_engine(checkpoint=copy_of(gpt2, tmp_path / "b", lambda tensors: tensors.update(HEAD)))
    assert sum("v_head.summary.bias" in record.message for record in caplog.records) == 1
