"""Tensors as the servers of a checkpoint hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollfeed.errors import CheckpointError
from rollfeed.weights import DiskTransport
from rollfeed.weights.serving import ServingForm
from rollfeed.weights.serving.fp8 import quantise, reference

BLOCK = (128, 128)
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
EMBEDDING = "model.embed_tokens.weight"
MATRIX = "model.layers.0.mlp.down_proj.weight"
SCALE = f"{MATRIX}_scale_inv"


def random_matrix(rows: int = 200, columns: int = 300) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) / 50


def make_checkpoint(
    folder: Path, about: Mapping[str, Any] | None, *, without: str = "", **changes: torch.Tensor
) -> Path:
    """Write a folder whose one matrix is in FP8."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({} if about is None else {"quantization_config": about}))
    codes, scale = quantise(torch.ones(200, 300), BLOCK)
    tensors = {EMBEDDING: torch.ones(8, 4, dtype=torch.bfloat16), MATRIX: codes, SCALE: scale}
    tensors |= {SCALE: changes["scale"]} if "scale" in changes else {}
    save_file({name: tensor for name, tensor in tensors.items() if name != without}, folder / "model.safetensors")
    return folder


def test_what_is_fp8_in_the_checkpoint_goes_with_its_scales_and_the_rest_in_its_type(tmp_path: Path) -> None:
    form = ServingForm(make_checkpoint(tmp_path, FP8))
    matrix = random_matrix()
    trained = {EMBEDDING: torch.full((8, 4), 0.3), MATRIX: matrix, "model.own": torch.ones(2)}
    served = dict(form.of(trained))
    assert list(served) == [EMBEDDING, MATRIX, SCALE, "model.own"]
    assert torch.equal(served[EMBEDDING], trained[EMBEDDING].bfloat16())
    codes, scale = quantise(matrix, BLOCK)
    assert torch.equal(served[MATRIX].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(served[SCALE], scale)
    assert served["model.own"] is not None
    assert served["model.own"].dtype == torch.float32


def make_fp8_checkpoint(folder: Path, names: Sequence[str]) -> Path:
    """Write a folder of matrices in FP8 with a norm behind each third."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    codes, scale = quantise(torch.ones(130, 20), BLOCK)
    tensors = {name: codes.clone() for name in names} | {f"{name}_scale_inv": scale.clone() for name in names}
    tensors |= {f"{name}.norm": torch.ones(4) for name in names[::3]}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_matrices_that_one_launch_makes_fp8_of_come_as_if_one_after_another(tmp_path: Path, monkeypatch) -> None:
    names = [f"model.layers.{number}.weight" for number in range(120)]
    form = ServingForm(make_fp8_checkpoint(tmp_path / "served", names))
    trained: dict[str, torch.Tensor] = {}
    for number, name in enumerate(names):
        # Each third of the first sixty has a norm behind it; one matrix is of another type.
        trained[name] = random_matrix(130, 20) * (number + 1)
        trained |= {f"{name}.norm": torch.ones(4)} if number % 3 == 0 and number < 60 else {}
    trained[names[100]] = trained[names[100]].bfloat16()
    alone = list(form.of(trained))
    launches: list[int] = []

    def launched(tensors, block, *, scale_type):
        launches.append(len(tensors))
        assert len({tensor.dtype for tensor in tensors}) == 1
        return [reference(tensor, block, scale_type=scale_type) for tensor in tensors]

    monkeypatch.setattr("rollfeed.weights.serving.fp8.is_fused", lambda tensor, block: tensor.shape == (130, 20))
    monkeypatch.setattr("rollfeed.weights.serving.fp8.fused", launched)
    together = list(form.of(trained))
    assert [name for name, _ in together] == [name for name, _ in alone]
    for (_, ours), (_, theirs) in zip(together, alone, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert max(launches) == 32
    trained[names[70]][3, 4] = torch.inf
    with pytest.raises(CheckpointError, match=rf"{names[70]}' has values that are not finite"):
        list(form.of(trained))


def test_headers_say_what_is_given_without_computing_it(tmp_path: Path) -> None:
    types = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.int64: "I64"}
    form = ServingForm(make_checkpoint(tmp_path, FP8), untied_head=True)
    trained = {EMBEDDING: torch.ones(8, 4), MATRIX: random_matrix(), "model.own": np.array([1, 2])}
    served = dict(form.of(trained))
    assert "lm_head.weight" in served
    assert form.headers(trained) == {
        name: (tuple(tensor.shape), types[tensor.dtype]) for name, tensor in served.items()
    }


def test_a_folder_is_written_with_codes_and_scales(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", FP8)
    folder = DiskTransport(tmp_path / "out", checkpoint=checkpoint).write({MATRIX: random_matrix()}, policy_version=1)
    written = load_file(folder / "model.safetensors")
    codes, scale = quantise(random_matrix(), BLOCK)
    assert written.keys() == {MATRIX, SCALE}
    assert torch.equal(written[MATRIX].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(written[SCALE], scale)


def test_codes_and_scales_may_be_in_two_files(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", FP8)
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + (name == SCALE)}-of-00002.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, checkpoint / file)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    folder = DiskTransport(tmp_path / "out", checkpoint=checkpoint).write({MATRIX: random_matrix()}, policy_version=1)
    assert torch.equal(load_file(folder / files[SCALE])[SCALE], quantise(random_matrix(), BLOCK).scale)
    assert load_file(folder / files[MATRIX]).keys() == {MATRIX}


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "cannot be published as 'gptq'"),
        (FP8 | {"fmt": "e5m2"}, "with fmt 'e5m2'"),
        (FP8 | {"activation_scheme": "static"}, "with activation_scheme 'static'"),
        (FP8 | {"scale_fmt": "ue8m0"}, "with scale_fmt 'ue8m0'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size is"),
        (FP8 | {"weight_block_size": [64, 64]}, r"with scales of \(2, 3\) F32, where \(4, 5\)"),
        ({"quant_method": "fp8"}, "has no .*weight_scale'"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, about: Mapping[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        ServingForm(make_checkpoint(tmp_path, about))


def test_a_missing_format_is_e4m3(tmp_path: Path) -> None:
    assert ServingForm(make_checkpoint(tmp_path, FP8 | {"fmt": None, "activation_scheme": "dynamic"})).is_fp8(MATRIX)


def test_fp8_without_scales_or_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no .*_scale_inv"):
        ServingForm(make_checkpoint(tmp_path, FP8, without=SCALE))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="not known without the weights"):
        ServingForm(tmp_path)


def test_scales_have_the_type_that_they_have_in_the_checkpoint(tmp_path: Path) -> None:
    form = ServingForm(make_checkpoint(tmp_path, FP8, scale=torch.ones(2, 3, dtype=torch.bfloat16)))
    served = dict(form.of({MATRIX: random_matrix()}))
    assert served[SCALE].dtype == torch.bfloat16
    assert torch.equal(
        served[MATRIX].view(torch.uint8),
        quantise(random_matrix(), BLOCK, scale_type=torch.bfloat16).codes.view(torch.uint8),
    )


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_refused_by_name(tmp_path: Path, bad: float) -> None:
    form = ServingForm(make_checkpoint(tmp_path, FP8))
    matrix = random_matrix()
    matrix[150, 7] = bad
    with pytest.raises(CheckpointError, match=f"{MATRIX}.*not finite"):
        list(form.of({MATRIX: matrix}))


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    form = ServingForm(make_checkpoint(tmp_path, FP8))
    for ask in (
        lambda: list(form.of({MATRIX: torch.ones(300, 200)})),
        lambda: form.headers({EMBEDDING: torch.ones(8)}),
    ):
        with pytest.raises(CheckpointError, match=r"has the shape .* of another model"):
            ask()
