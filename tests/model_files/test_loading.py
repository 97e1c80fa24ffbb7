from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rollfeed.errors import CheckpointError
from rollfeed.model_files.loading import check_model, load_causal_model

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {**SIZES, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A decoder whose tensors are as its parameters, and one whose experts are fused when it is loaded."""
    folders = {}
    for config in (transformers.LlamaConfig(**SIZES), transformers.Qwen3MoeConfig(**EXPERTS)):
        torch.manual_seed(0)
        folders[config.model_type] = tmp_path_factory.mktemp(config.model_type)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folders[config.model_type])
    return folders


@pytest.fixture(params=["llama", "qwen3_moe"])
def changed(request: pytest.FixtureRequest, saved: dict[str, Path], tmp_path: Path) -> Callable[[Change], Path]:
    """Return a function that copies the model with changed tensors."""

    def make(change: Change = lambda tensors: None) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(saved[request.param], folder)
        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return folder

    return make


def state(model: Any) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def test_a_model_is_what_transformers_makes_of_its_folder(changed: Callable[..., Path]) -> None:
    folder = changed()
    check_model(folder)
    ours = load_causal_model(folder, dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(ours) is type(theirs)
    assert state(ours) == state(theirs)
    assert len(ours._weight_conversions) == len(theirs._weight_conversions)


def test_what_the_check_does_not_read_is_not_needed(changed: Callable[..., Path]) -> None:
    """Only names and shapes count: no memory is taken for tensors, whatever they are."""
    folder = changed()
    with (folder / SINGLE).open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"\xff" * 8)
    check_model(folder)


@pytest.mark.parametrize("use", [check_model, lambda folder: load_causal_model(folder, dtype=torch.float32)])
def test_tensors_that_are_missing_or_of_another_shape_are_named(
    changed: Callable[..., Path], use: Callable[[Path], Any]
) -> None:
    folder = changed(lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"))
    with pytest.raises(CheckpointError, match=r"weight 'model\.layers\.1\.self_attn\.q_proj\.weight' is missing"):
        use(folder)
    shutil.rmtree(folder)
    folder = changed(lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}))
    with pytest.raises(
        CheckpointError, match=r"weight 'model\.norm\.weight': its shape is \(5,\), the model's \(16,\)"
    ):
        use(folder)


def test_tensors_that_the_model_does_not_have_are_told_of_once(
    changed: Callable[..., Path], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    extra = {"v_head.summary.weight": torch.zeros(1, 16), "score.weight": torch.zeros(1, 16)}
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    folder = changed(lambda tensors: tensors.update(extra | old))
    check_model(folder)
    load_causal_model(folder, dtype=torch.float32)
    [record] = [record for record in caplog.records if record.name.startswith("rollfeed")]
    assert "score.weight, v_head.summary.weight (2 in all)" in record.message
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_files_that_do_not_count_are_not_loaded(changed: Callable[..., Path]) -> None:
    folder = changed()
    expected = state(load_causal_model(folder, dtype=torch.float32))
    other = {name: tensor + 1.0 for name, tensor in load_file(folder / SINGLE).items()}
    save_file(other, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    places = dict.fromkeys(other, "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    assert state(load_causal_model(folder, dtype=torch.float32)) == expected
    (folder / SINGLE).unlink()
    assert state(load_causal_model(folder, dtype=torch.float32)) != expected


def test_a_model_that_transformers_does_not_know_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NewForCausalLM"], "model_type": "new"}')
    save_file({"a": torch.zeros(1)}, tmp_path / SINGLE)
    for use in (check_model, lambda folder: load_causal_model(folder, dtype=torch.float32)):
        with pytest.raises(CheckpointError, match="transformers cannot load it") as caught:
            use(tmp_path)
        assert "\n" not in str(caught.value)


def test_values_that_are_not_finite_are_named(changed: Callable[..., Path]) -> None:
    folder = changed(lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=r"weight 'model\.norm\.weight': some of its values are not finite"):
        load_causal_model(folder, dtype=torch.float32)
