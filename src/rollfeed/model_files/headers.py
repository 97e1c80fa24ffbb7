"""Chooses the weight files of a folder that are loaded, and reads their headers.

The choice is that of transformers, so that whatever loads a folder loads the same. No tensor is read here: a look
costs some kilobytes a file, whatever the size of the model. The header's form is that of the safetensors format: its
length in 8 bytes, little-endian, then JSON, then the tensors' bytes to the end.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from rollfeed.errors import CheckpointError
from rollfeed.model_files.content import check_content, read_object, refusal, unreadable

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Says which tensor is in which file, where there are several."""

BESIDE_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "*.spm", "*.bpe", "*.vocab")
"""The rest of a model: configurations, tokenizers, chat templates, and the code of those that bring their own."""

_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_SHARD = re.compile(r"-[0-9]{5}-of-[0-9]{5}\.safetensors$")
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_NUM_NAMED = 4
"""Tensors named in a warning."""
_told: set[tuple[Path, frozenset[str]]] = set()


class TensorHeader(NamedTuple):
    """Shape and type of a tensor, as a header has them."""

    shape: tuple[int, ...]
    dtype: str
    """As the format calls it, for example ``BF16``."""

    @property
    def is_floating_point(self) -> bool:
        """Whether its values are floating point numbers."""
        return self.dtype.startswith(("F", "BF"))


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    header: TensorHeader
    start: int
    """Where its bytes begin, counted from the file's beginning."""
    end: int
    """Where they end, exclusive."""


def weight_files(folder: Path) -> list[Path]:
    """Return the files that a model's weights are loaded from, chosen as transformers does.

    ``model.safetensors`` comes before an index, and no other file counts. A tensor that is in several of the files is
    that of the last one.

    Raises:
        CheckpointError: If there are none, or an index is unreadable.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if os.path.isfile(single):  # which raises nothing where a folder may not be looked into
        return [single]
    if os.path.isfile(index):
        return [folder / name for name in sorted(_tensors_by_file(index))]
    raise _missing_weights(folder)


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights of any kind, or is meant to have."""
    return any(True for kind in ("safetensors", "safetensors.index.json", "bin") for _ in folder.glob(f"*.{kind}"))


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of all tensors of a folder, by name.

    Raises:
        CheckpointError: If a file is missing, cut short or something else, or lacks a tensor of the index.
    """
    return {name: header for tensors in headers_by_file(folder).values() for name, header in tensors.items()}


def read_stored(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file's header, by name, once the file is as long as it says.

    Raises:
        CheckpointError: If it cannot be read, is cut short or something else.
    """
    check_content(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            text = file.read(num_bytes) if 2 <= num_bytes <= min(_MAX_HEADER_BYTES, size - 8) else b""
    except OSError as error:
        raise unreadable(path, error) from error
    if not text:
        problem = "is empty" if size == 0 else "is cut short or no safetensors file"
        raise refusal(path, f"{problem}: fetch it again")
    tensors = _parsed_header(path, text)
    end = max(tensor.end for tensor in tensors.values())
    if size != end:
        raise refusal(path, f"has {size} of {end} bytes: fetch it again")
    return tensors


def headers_by_file(folder: Path) -> dict[str, dict[str, TensorHeader]]:
    """Return the headers of all tensors by the file, relative to the folder, that each is loaded from.

    Raises:
        CheckpointError: As :func:`read_headers`.
    """
    headers = {
        file: {name: tensor.header for name, tensor in read_stored(file).items()} for file in weight_files(folder)
    }
    _check_index(folder, headers)
    last: dict[str, Path] = {}
    for file, tensors in headers.items():
        twice = last.keys() & tensors.keys()
        if twice:
            _tell_once(folder, twice, f"the tensor {min(twice)!r} is in several files; that of {file.name} is loaded")
        last |= dict.fromkeys(tensors, file)
    return {
        str(file.relative_to(folder)): {name: header for name, header in tensors.items() if last[name] == file}
        for file, tensors in headers.items()
    }


def check_tensors(
    folder: Path,
    headers: Mapping[str, TensorHeader],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    ties: Iterable[Collection[str]] = (),
) -> None:
    """Compare the tensors of a folder with those of its model; what the model does not have is told of.

    ``ties`` are names that stand for one weight, of which one is enough.

    Raises:
        CheckpointError: If one is missing, of another shape, or no floating point.
    """
    for name in headers.keys() & shapes.keys():
        if headers[name].shape != shapes[name]:
            raise mismatch(folder, name, headers[name].shape, shapes[name])
        if not headers[name].is_floating_point:
            raise CheckpointError(
                f"{folder}: weight {name!r}: its values are {headers[name].dtype}, not floating point: give the model "
                "before it was quantised"
            )
    there = set(headers)
    for names in ties:
        there |= set(names) if there & set(names) else set()
    refuse_missing(folder, shapes.keys() - there)
    tell_of_unknown(folder, headers.keys() - shapes.keys())


def mismatch(folder: Path, name: str, found: Iterable[int], expected: Iterable[int]) -> CheckpointError:
    """Return what to say of a weight that is not of the model's shape."""
    return CheckpointError(
        f"{folder}: weight {name!r}: its shape is {tuple(found)}, the model's {tuple(expected)}: config.json and the "
        "weights are not of one model"
    )


def refuse_missing(folder: Path, missing: Collection[str]) -> None:
    """Raise CheckpointError if weights of the model are not in its files."""
    if missing:
        raise CheckpointError(
            f"{folder}: weight {min(missing)!r} is missing ({len(missing)} are): the files are not all of this model's"
        )


def tell_of_unknown(folder: Path, names: Collection[str]) -> None:
    """Warn of tensors that the model does not have, once in a process.

    Buffers of rotary embeddings are passed over: older checkpoints carry them, and they follow from the configuration.
    """
    unknown = sorted(name for name in names if not name.endswith("rotary_emb.inv_freq"))
    if unknown:
        shown = ", ".join(unknown[:_NUM_NAMED]) + (", ..." if len(unknown) > _NUM_NAMED else "")
        _tell_once(folder, unknown, f"not loaded, since the model has no such tensors: {shown} ({len(unknown)} in all)")


def _tell_once(folder: Path, names: Iterable[str], message: str) -> None:
    key = (folder, frozenset(names))
    if key not in _told:
        _told.add(key)
        logger.warning("%s: %s", folder, message)


def _tensors_by_file(index: Path) -> dict[str, set[str]]:
    """Return which tensors an index places in which file."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refusal(index, "has no weight_map: fetch it again")
    found: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or not _is_inside(file):
            raise refusal(index, f"names the file {file!r}, which is not beside it or no *.safetensors")
        found.setdefault(file, set()).add(tensor)
    return found


def _check_index(folder: Path, headers: Mapping[Path, Mapping[str, TensorHeader]]) -> None:
    """Refuse an index that is not true of its files; tell of one that is not asked."""
    index = folder / INDEX_FILE
    if not os.path.isfile(index):
        return
    if folder / WEIGHTS_FILE in headers:
        with suppress(CheckpointError):
            if _tensors_by_file(index).keys() == {WEIGHTS_FILE}:
                return
        _tell_once(folder, [INDEX_FILE], f"{WEIGHTS_FILE} is loaded, and not the files that {INDEX_FILE} names")
        return
    for name, tensors in _tensors_by_file(index).items():
        lacking = tensors - headers[folder / name].keys()
        if lacking:
            raise refusal(folder / name, f"lacks the tensor {min(lacking)!r} that {INDEX_FILE} places there")


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _missing_weights(folder: Path) -> CheckpointError:
    for name in (WEIGHTS_FILE, INDEX_FILE):
        if os.path.lexists(folder / name):  # a link that leads nowhere, or a folder
            try:
                check_content(folder / name)
            except CheckpointError as error:
                return error
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    pickled = [name for name in _PICKLED if os.path.exists(folder / name)]
    if any(map(_SHARD.search, others)):
        return CheckpointError(f"{folder}: it has shards, but {INDEX_FILE} is missing: fetch it too")
    if others and others[0].startswith("adapter"):
        return CheckpointError(f"{folder}: it has only an adapter ({others[0]}): merge it into its base model first")
    if others:
        return CheckpointError(
            f"{folder}: {others[0]} is no name that weights are loaded from: call it {WEIGHTS_FILE} if it is a whole "
            "model in the Hugging Face layout"
        )
    if pickled:
        return CheckpointError(
            f"{folder}: no *.safetensors weights, only {pickled[0]}, which is not loaded because it may hold a "
            "program: convert the model with save_pretrained first"
        )
    return CheckpointError(f"{folder}: no *.safetensors weights; convert the model with save_pretrained first")


def _parsed_header(path: Path, text: bytes) -> dict[str, StoredTensor]:
    """Return the tensors of a header."""
    starts_at = 8 + len(text)
    try:
        header: dict[str, Any] = json.loads(text)
        found = {name: _stored(value, starts_at=starts_at) for name, value in header.items() if name != "__metadata__"}
    except (ValueError, RecursionError):
        raise refusal(path, "has a header that is not JSON: fetch it again") from None
    except (TypeError, KeyError, IndexError, AttributeError):
        raise refusal(path, "has a header without data_offsets, shape or dtype: fetch it again") from None
    if not found:
        raise refusal(path, "has no tensors")
    return found


def _stored(value: Mapping[str, Any], *, starts_at: int) -> StoredTensor:
    start, end = value["data_offsets"][0], value["data_offsets"][1]
    header = TensorHeader(tuple(map(int, value["shape"])), str(value["dtype"]))
    return StoredTensor(header, starts_at + int(start), starts_at + int(end))
