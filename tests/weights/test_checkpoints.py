from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollfeed.errors import CheckpointError
from rollfeed.weights import check_complete, version_of

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("version-000012", 12),
        ("step_12", 12),
        ("step12", 12),
        ("12", 12),
        ("0", 0),
        ("global.step.7", 7),
        ("llama-3.2", None),
        ("version-", None),
        ("step_12_old", None),
        ("latest", None),
        ("1" * 40, None),
        ("step_१२", None),
    ],
)
def test_the_version_is_the_number_at_the_end_of_the_name(name: str, version: int | None) -> None:
    assert version_of(name) == version


def test_whole_checkpoints_are_complete(make_checkpoint: Callable[..., Path]) -> None:
    check_complete(make_checkpoint("1"))
    check_complete(make_checkpoint("2", shards=3))


def remove(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).unlink()


def cut(file: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size])


def write(file: str, text: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("config.json"), "config.json is missing"),
        (write("config.json", b"{"), "config.json is not JSON"),
        (write("config.json", b"[]"), "config.json is not a JSON object"),
        (remove("model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors is missing"),
        (remove(INDEX), f"{INDEX} is missing"),
        (write(INDEX, b"{}"), "no weight_map"),
        (write(INDEX, b'{"weight_map": {"t1": "../../elsewhere.safetensors"}}'), "is not beside it"),
        (write(INDEX, b'{"weight_map": {"t9": "model-00001-of-00002.safetensors"}}'), "lacks the tensor 't9'"),
        (cut("model-00001-of-00002.safetensors", 5), "cut short"),
        (cut("model-00001-of-00002.safetensors", 20), "cut short"),
        (cut("model-00001-of-00002.safetensors", -1), "bytes"),
        (write("model-00001-of-00002.safetensors", b"\0" * 100), "no safetensors file"),
        (write("model-00001-of-00002.safetensors", b"\2" + b"\0" * 7 + b"{}"), "has no tensors"),
        (write("model-00001-of-00002.safetensors", b"\x08" + b"\0" * 7 + b'{"a":12}'), "without data_offsets"),
    ],
)
def test_what_is_missing_or_cut_short_is_named(
    make_checkpoint: Callable[..., Path], damage: Callable[[Path], object], message: str
) -> None:
    folder = make_checkpoint("1", shards=2)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        check_complete(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_is_not_complete(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint("1")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        check_complete(folder)
