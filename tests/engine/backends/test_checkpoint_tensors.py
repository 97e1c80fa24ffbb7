from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rollfeed.engine.backends.replacement import CheckpointTensors, read_tensors

TENSORS = {
    "matrix": torch.arange(6.0).view(2, 3),
    "half": torch.arange(4.0).bfloat16(),
    "double": torch.tensor(0.5, dtype=torch.float64),
    "table": torch.arange(5),
    "none": torch.zeros(0, 7),
}


def test_tensors_are_those_of_the_file_and_stay_when_it_goes_away(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert CheckpointTensors(tmp_path, {"half"}).keys() == {"half"}
    found = read_tensors(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def test_tensors_that_begin_at_odd_bytes_are_read(tmp_path: Path) -> None:
    header = json.dumps({"odd": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * ((3 - len(header)) % 8)
    values = torch.tensor([1.5, -2.0])
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    assert torch.equal(CheckpointTensors(tmp_path)["odd"], values)


def test_a_header_that_the_format_does_not_allow_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(SafetensorError):
        CheckpointTensors(tmp_path)


def test_reading_again_and_again_keeps_nothing(tmp_path: Path) -> None:
    save_file({str(number): torch.zeros(8) for number in range(50)}, tmp_path / "model.safetensors")
    read_tensors(tmp_path)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(20):
        read_tensors(tmp_path)
    gc.collect()
    assert sys.getallocatedblocks() - before < 20 * 50 / 2
