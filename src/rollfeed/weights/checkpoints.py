"""Whether a folder holds a whole checkpoint, from its names and the headers of its files.

No tensor is read: a look costs some kilobytes a file, whatever the size of the model. The header's form is that of
the safetensors format: its length in 8 bytes, little-endian, then JSON, then the tensors' bytes to the end.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rollfeed.errors import CheckpointError

_VERSION = re.compile(r"(?<![0-9])(?<![0-9]\.)([0-9]{1,18})$")
_SHARD = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.safetensors$")
_INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


def version_of(name: str) -> int | None:
    """Return the number at the end of a folder's name; None where there is none.

    ``version-000012``, ``step_12`` and ``12`` are version 12; ``llama-3.2`` is no version.
    """
    found = _VERSION.search(name)
    return None if found is None else int(found.group(1))


def check_complete(folder: Path) -> None:
    """Refuse a folder that is not a whole checkpoint in Hugging Face layout.

    Raises:
        CheckpointError: If ``config.json`` or a weight file is missing, cut short or unreadable; says which, and not
            where the folder is.
    """
    try:
        _read_object(folder / "config.json")
        if (folder / _INDEX_FILE).exists():
            _check_index(folder)
        else:
            _check_files(folder)
    except FileNotFoundError as error:
        raise CheckpointError(f"{Path(error.filename or folder).name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"it cannot be read ({error.strerror or error})") from error


def _check_index(folder: Path) -> None:
    weight_map = _read_object(folder / _INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{_INDEX_FILE} has no weight_map")
    names_of: dict[str, list[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{_INDEX_FILE} names the file {file!r}, which is not beside it")
        names_of.setdefault(file, []).append(tensor)
    for file, tensors in sorted(names_of.items()):
        header = _read_header(folder / file)
        missing = sorted(name for name in tensors if name not in header)
        if missing:
            raise CheckpointError(f"{file} lacks the tensor {missing[0]!r} that {_INDEX_FILE} places there")


def _check_files(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError("it has no *.safetensors")
    if any(_SHARD.search(file.name) for file in files):
        raise CheckpointError(f"it has shards, but {_INDEX_FILE} is missing")
    for file in files:
        _read_header(file)


def _read_header(path: Path) -> dict[str, Any]:
    """Return a file's header once the file is as long as it says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path.name} is cut short or no safetensors file")
        header = _parsed(file.read(header_bytes), path.name)
    tensors = [value for name, value in header.items() if name != "__metadata__"]
    try:
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
    except (TypeError, KeyError, IndexError, ValueError):
        raise CheckpointError(f"{path.name} has a header without data_offsets") from None
    if not tensors:
        raise CheckpointError(f"{path.name} has no tensors")
    if size != 8 + header_bytes + end:
        raise CheckpointError(f"{path.name} has {size} of {8 + header_bytes + end} bytes")
    return header


def _read_object(path: Path) -> dict[str, Any]:
    return _parsed(path.read_bytes(), path.name)


def _parsed(text: bytes, name: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{name} is not JSON, or cut short") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} is not a JSON object")
    return content
