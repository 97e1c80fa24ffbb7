from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rollfeed.errors import CheckpointError
from rollfeed.model_files import TensorHeader, check_tensors, read_headers, tell_of_unknown, weight_files

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"


def save(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.zeros((2, 3), np.float32) for name in names}, path)


def write_index(folder: Path, **places: str) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write_shards(folder: Path) -> None:
    save(folder / SHARDS[0], "a")
    save(folder / SHARDS[1], "b")
    write_index(folder, a=SHARDS[0], b=SHARDS[1])


def test_a_single_file_comes_before_an_index_and_both_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_shards(tmp_path)
    save(tmp_path / SINGLE, "c")
    assert weight_files(tmp_path) == [tmp_path / SINGLE]
    assert list(read_headers(tmp_path)) == ["c"]
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: {SINGLE} is loaded, and not the files that {INDEX} names"
    ]
    read_headers(tmp_path)
    assert len(caplog.records) == 1


def test_an_index_of_the_single_file_is_nothing_to_speak_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / SINGLE, "c")
    write_index(tmp_path, c=SINGLE)
    read_headers(tmp_path)
    assert not caplog.records


def test_other_files_of_the_folder_are_not_loaded(tmp_path: Path) -> None:
    write_shards(tmp_path)
    others = [
        "adapter_model.safetensors",
        "consolidated.safetensors",
        "optimizer.safetensors",
        "model.fp16.safetensors",
    ]
    for name in (*others, "model-00003-of-00002.safetensors", "old/model.safetensors"):
        save(tmp_path / name, "z")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    assert weight_files(tmp_path) == [tmp_path / name for name in SHARDS]
    assert list(read_headers(tmp_path)) == ["a", "b"]


def test_the_choice_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    def theirs() -> list[Path]:
        found, _ = _get_resolved_checkpoint_files(str(tmp_path), None, None, None, None, False)
        return [Path(file) for file in found or []]

    write_shards(tmp_path)
    assert weight_files(tmp_path) == theirs()
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    assert weight_files(tmp_path) == theirs()
    (tmp_path / SINGLE).mkdir()
    assert weight_files(tmp_path) == theirs()
    (tmp_path / SINGLE).rmdir()
    (tmp_path / SINGLE).symlink_to(tmp_path / "nowhere")
    assert weight_files(tmp_path) == theirs()
    (tmp_path / SINGLE).unlink()
    save(tmp_path / SINGLE, "a")
    assert weight_files(tmp_path) == theirs() == [tmp_path / SINGLE]


def test_shards_may_lie_in_a_folder_below_and_be_links(tmp_path: Path) -> None:
    save(tmp_path / "blobs" / "1", "a")
    folder = tmp_path / "snapshot"
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "x.safetensors").symlink_to("../../blobs/1")
    write_index(folder, a="part/x.safetensors")
    assert read_headers(folder) == {"a": TensorHeader((2, 3), "F32")}


def test_a_tensor_in_two_shards_is_that_of_the_last_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_shards(tmp_path)
    save_file({"a": np.zeros(7, np.float16), "b": np.zeros(1, np.float32)}, tmp_path / SHARDS[1])
    assert read_headers(tmp_path)["a"] == TensorHeader((7,), "F16")
    assert f"the tensor 'a' is in several files; that of {SHARDS[1]} is loaded" in caplog.text


def only(*names: str) -> Callable[[Path], object]:
    return lambda folder: [save(folder / name, "a") for name in names]


def text(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def index(**places: Any) -> Callable[[Path], object]:
    return lambda folder: write_index(folder, **places)


def cut(size: int) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        save(folder / SINGLE, "a")
        (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:size])

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: None, "no *.safetensors weights; convert the model with save_pretrained"),
        (text("pytorch_model.bin", b"x"), "only pytorch_model.bin, which is not loaded because it may hold a program"),
        (only(*SHARDS), f"it has shards, but {INDEX} is missing"),
        (only("adapter_model.safetensors"), "only an adapter (adapter_model.safetensors): merge it"),
        (
            only("consolidated.safetensors"),
            "consolidated.safetensors is no name that weights are loaded from",
        ),
        (lambda folder: (folder / SINGLE).mkdir(), f"{SINGLE} is a folder, not a file"),
        (lambda folder: (folder / SINGLE).symlink_to("gone"), f"{SINGLE} is a link to a file that is not there"),
        (text(SINGLE, POINTER), f"{SINGLE} is a Git LFS pointer, not the weights: run git lfs pull"),
        (text(SINGLE, b"\n<!DOCTYPE html><html>"), f"{SINGLE} is a web page, not the weights"),
        (text(SINGLE, b"<?xml version='1.0'?><Error>AccessDenied"), f"{SINGLE} is a web page, not the weights"),
        (text(SINGLE, b"PK\x03\x04" + b"\0" * 99), f"{SINGLE} is a zip archive"),
        (text(SINGLE, b""), f"{SINGLE} is empty"),
        (text(SINGLE, b'{"error": "Repository not found"}'), f"{SINGLE} is cut short or no safetensors file"),
        (cut(-4), f"{SINGLE} has "),
        (cut(30), f"{SINGLE} is cut short"),
        (text(INDEX, POINTER), f"{INDEX} is a Git LFS pointer, not the file itself: run git lfs pull"),
        (text(INDEX, b""), f"{INDEX} is empty"),
        (text(INDEX, b'{"weight_map"'), f"{INDEX} is not JSON, or cut short"),
        (text(INDEX, b"[]"), f"{INDEX} is not a JSON object"),
        (index(), f"{INDEX} has no weight_map"),
        (index(a=SHARDS[0]), f"{SHARDS[0]} is missing"),
        (index(a="../model.safetensors"), "which is not beside it"),
        (index(a="/model.safetensors"), "which is not beside it"),
        (index(a="model.bin"), "or no *.safetensors"),
        (index(a=3), "names the file 3"),
    ],
)
def test_what_is_not_whole_is_one_line_with_its_name(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_headers(tmp_path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    save(tmp_path / SINGLE, "a")
    (tmp_path / SINGLE).chmod(0)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied\): make it readable"):
        read_headers(tmp_path)


def test_a_shard_without_a_tensor_of_the_index_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_index(tmp_path, a=SHARDS[0], b=SHARDS[1], c=SHARDS[0])
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]} lacks the tensor 'c' that {INDEX} places there"):
        read_headers(tmp_path)


def test_headers_are_those_of_the_files(tiny_checkpoint: Path) -> None:
    tensors = load_file(tiny_checkpoint / SINGLE)
    assert read_headers(tiny_checkpoint) == {name: TensorHeader(each.shape, "F32") for name, each in tensors.items()}


def test_tensors_are_compared_with_those_of_the_model(tmp_path: Path) -> None:
    shapes = {"in": (2, 3), "out": (2, 3), "norm": (3,)}
    whole = {name: TensorHeader(shape, "BF16") for name, shape in shapes.items()}
    check_tensors(tmp_path, whole, shapes)
    for name in shapes:
        lacking = {each: header for each, header in whole.items() if each != name}
        with pytest.raises(CheckpointError, match=rf"weight '{name}' is missing \(1 are\)"):
            check_tensors(tmp_path, lacking, shapes)
        if name != "norm":
            check_tensors(tmp_path, lacking, shapes, ties=[("in", "out")])
    with pytest.raises(CheckpointError, match=r"weight 'norm': its shape is \(4,\), the model's \(3,\)"):
        check_tensors(tmp_path, {**whole, "norm": TensorHeader((4,), "F32")}, shapes)
    with pytest.raises(CheckpointError, match="weight 'norm': its values are I8, not floating point"):
        check_tensors(tmp_path, {**whole, "norm": TensorHeader((3,), "I8")}, shapes)


def test_unknown_tensors_are_told_of_once_with_names_and_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"mtp.{number}" for number in range(9)]
    for _ in range(2):
        tell_of_unknown(tmp_path, names)
        tell_of_unknown(tmp_path, ["model.layers.0.self_attn.rotary_emb.inv_freq"])
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "mtp.0, mtp.1, mtp.2, mtp.3, ... (9 in all)" in record.message
    tell_of_unknown(tmp_path, ["v_head.weight"])
    assert "v_head.weight (1 in all)" in caplog.records[-1].message
