"""Weights written to disk, for servers to read and as the model that training leaves.

A folder is as the checkpoint's: the same tensors in the same files, each in the type that it has there
(:class:`ServingForm`), whatever the trainer computes in; with its configuration, its tokenizer and its code.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollfeed.base.atomic import DIGESTS
from rollfeed.model_files import (
    BESIDE_WEIGHTS,
    INDEX_FILE,
    WEIGHTS_FILE,
    read_object,
)
from rollfeed.weights.serving import ServingForm

_MORE_TEMPLATES = "additional_chat_templates"
_OF_OTHER_WEIGHTS = ("*.index.json", "adapter_config.json", DIGESTS, "export.json")
"""Small files that speak of weights that are not written along."""
_METADATA = {"format": "pt"}
"""What loaders ask of a file: names and layout are PyTorch's."""


def write_checkpoint(tensors: Mapping[str, Any], folder: Path, *, checkpoint: Path) -> None:
    """Fill a folder with ``tensors``, all numpy or all torch, and all else of ``checkpoint``.

    Tensors of the checkpoint that are not given, since the model that was trained has no use for them, are those of the
    checkpoint.

    Raises:
        CheckpointError: If the checkpoint is not what it was.
        OSError: If it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _fill(folder, tensors, checkpoint, ServingForm(checkpoint), complete=True)


def write_some(tensors: Mapping[str, Any], folder: Path, *, checkpoint: Path | None, untied_head: bool = False) -> None:
    """Fill a folder with ``tensors`` alone, and what is beside the weights of ``checkpoint``.

    Without PyTorch, numpy arrays are written in the types that they have.

    Tensors are all numpy or all torch; the folder is empty. ``untied_head`` writes an output head that is the
    embeddings under its own name, too: vLLM keeps its old one otherwise when it reloads.

    Raises:
        CheckpointError: If the checkpoint is not what it was.
        OSError: If it cannot be written.
    """
    _fill(folder, tensors, checkpoint, ServingForm(checkpoint, untied_head=untied_head))


def _fill(
    folder: Path, tensors: Mapping[str, Any], checkpoint: Path | None, form: ServingForm, *, complete: bool = False
) -> None:
    if checkpoint is not None:
        copy_beside(checkpoint, folder)
    # A tensor in FP8 and its scales are made at once, also where they are in two files.
    sources = {served: name for name in tensors for served in form.headers({name: tensors[name]})}
    sources |= {name: name for name in tensors}
    files = {file: [name for name in held if complete or name in sources] for file, held in form.by_file.items()}
    if new := [name for name in sources if name not in form.stored]:
        files.setdefault(next(reversed(files), WEIGHTS_FILE), []).extend(new)
    files = {file: names for file, names in files.items() if names}
    num_bytes = 0
    for file, names in files.items():
        chosen = {sources[name]: tensors[sources[name]] for name in names if name in sources}
        served = {name: tensor for name, tensor in form.of(chosen) if name in names}
        if checkpoint is not None and len(served) < len(names):
            served |= _read(checkpoint, file, set(names) - served.keys())
        num_bytes += _save(served, folder / file)
    if files.keys() != {WEIGHTS_FILE}:
        _write_index(folder, files, checkpoint, num_bytes=num_bytes)


def copy_beside(checkpoint: Path, folder: Path) -> None:
    """Copy all of a model's folder but its weights."""
    for path in (path for pattern in BESIDE_WEIGHTS for path in checkpoint.glob(pattern)):
        if path.is_file() and not any(map(path.match, _OF_OTHER_WEIGHTS)):
            shutil.copyfile(path, folder / path.name)
    if (checkpoint / _MORE_TEMPLATES).is_dir():
        shutil.copytree(checkpoint / _MORE_TEMPLATES, folder / _MORE_TEMPLATES)


def _read(checkpoint: Path, file: str, names: Iterable[str]) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(checkpoint / file, framework="pt") as reader:
        return {name: reader.get_tensor(name) for name in names}


def _save(tensors: Mapping[str, Any], path: Path) -> int:
    """Write a file and return how many bytes its tensors have."""
    from safetensors import SafetensorError

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if importlib.util.find_spec("torch") is None:
            import numpy as np
            from safetensors.numpy import save_file

            arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
            save_file(arrays, path, metadata=_METADATA)
            return sum(array.nbytes for array in arrays.values())
        from safetensors.torch import save_file as save_torch

        # The format has no two names for one memory, which tied weights are.
        places = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
        separate = {
            name: tensor.to("cpu", copy=places[tensor.untyped_storage().data_ptr()] > 1).contiguous()
            for name, tensor in tensors.items()
        }
        save_torch(separate, path, metadata=_METADATA)
        return sum(tensor.nbytes for tensor in separate.values())
    except SafetensorError as error:  # what it calls a full disk
        raise OSError(str(error)) from error


def _write_index(folder: Path, files: Mapping[str, list[str]], checkpoint: Path | None, *, num_bytes: int) -> None:
    of_checkpoint = read_object(checkpoint / INDEX_FILE).get("metadata") if checkpoint is not None else None
    index = {
        "metadata": {**(of_checkpoint or {}), "total_size": num_bytes},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / INDEX_FILE).write_text(text, encoding="utf-8")
