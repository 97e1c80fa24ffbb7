"""Buckets of tensors, and what reads them from a text of anybody's."""

from __future__ import annotations

import base64
import io
import os
import pickle
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollfeed.base.tensor_buckets import bucket_of, bucket_text, make_buckets, read_bucket

TENSORS: dict[str, torch.Tensor] = {
    "odd": torch.arange(3, dtype=torch.uint8),
    "half": torch.arange(15).reshape(3, 5).bfloat16(),
    "codes": torch.arange(7).float().to(torch.float8_e4m3fn),
    "wide": torch.tensor([2**40, -1]),
    "scalar": torch.tensor(0.25),
    "empty": torch.zeros(0, 4),
    "turned": torch.arange(12.0).reshape(3, 4).T,
}


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("most_bytes", [1, 40, 1 << 20])
def test_tensors_of_all_types_come_through_buckets_of_every_size(most_bytes: int) -> None:
    buckets = list(make_buckets(TENSORS.items(), most_bytes=most_bytes))
    assert len(buckets) == {1: 6, 40: 2, 1 << 20: 1}[most_bytes]  # the empty one is with another
    read: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        read |= read_bucket(bucket_text(bucket))
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert bits(read[name]) == bits(tensor)


def test_a_received_bucket_has_the_places_of_the_one_that_was_sent() -> None:
    (sent,) = make_buckets(TENSORS.items(), most_bytes=1 << 20)
    room = bucket_of(list(sent.names), sent.dtype_names, [list(shape) for shape in sent.shapes], most_bytes=1 << 30)
    room.bytes_B.copy_(sent.bytes_B)
    assert {name: bits(tensor) for name, tensor in room.tensors().items()} == {n: bits(t) for n, t in TENSORS.items()}


def test_a_bucket_is_a_copy() -> None:
    given = torch.ones(4)
    (bucket,) = make_buckets([("a", given)], most_bytes=1)
    given.zero_()
    assert bucket.tensors()["a"].tolist() == [1.0] * 4


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


class HidesAnother(Runs):
    """Goes through the function of PyTorch that loads anything."""

    def __reduce__(self) -> Any:
        content = io.BytesIO()
        torch.save(Runs(self.folder), content)
        return torch.storage._load_from_bytes, (content.getvalue(),)


def entry(**changes: Any) -> dict[str, Any]:
    about = {"name": "a", "shape": torch.Size([2]), "dtype": torch.uint8, "start_idx": 0, "end_idx": 2, **changes}
    return {"flattened_tensor": torch.zeros(2, dtype=torch.uint8), "metadata": [SimpleNamespace(**about)]}


@pytest.mark.parametrize("kind", [Runs, HidesAnother])
def test_nothing_in_a_text_is_run(kind: type[Runs], tmp_path: Path) -> None:
    made = tmp_path / "made"
    for content in (kind(made), {"flattened_tensor": torch.zeros(1), "metadata": [kind(made)]}):
        with pytest.raises(ValueError, match="no bucket of tensors"):
            read_bucket(base64.b64encode(pickle.dumps(content)).decode())
        assert not made.exists()


@pytest.mark.parametrize(
    "content",
    [
        torch.nn.Linear(1, 1),
        [("a", torch.zeros(1))],
        entry(end_idx=3),
        entry(start_idx=-1),
        entry(shape=torch.Size([3])),
        entry(name=5),
        entry(dtype="uint8"),
    ],
)
def test_what_is_no_bucket_is_refused(content: Any) -> None:
    with pytest.raises(ValueError, match="no bucket of tensors"):
        read_bucket(base64.b64encode(pickle.dumps(content)).decode())


@pytest.mark.parametrize("text", ["!!!", "", base64.b64encode(b"no pickle").decode()])
def test_what_is_no_pickle_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no bucket of tensors"):
        read_bucket(text)


@pytest.mark.parametrize(("dtypes", "shapes"), [(["float32"], [[1], [2]]), (["Tensor"], [[1]]), (["x"], [[1]])])
def test_a_bucket_that_is_not_described_well_is_refused(dtypes: list[str], shapes: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="names, dtypes and shapes must be as many"):
        bucket_of(["a"], dtypes, shapes, most_bytes=1 << 20)


def test_a_number_in_a_text_makes_no_room_in_memory() -> None:
    """``LONG_BINPUT`` says where a memo is written; an array of as many places would be a gigabyte."""
    text = base64.b64encode(b"\x80\x02}r" + (1 << 26).to_bytes(4, "little") + b".").decode()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="flattened_tensor"):
            read_bucket(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000
