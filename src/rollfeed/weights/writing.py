"""Weights written to disk, for servers to read and as the model that training leaves.

A folder is as the checkpoint's: the same tensors in the same files, each in the type that it has there, whatever the
trainer computes in; with its configuration, its tokenizer and its code.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollfeed.model_files import (
    BESIDE_WEIGHTS,
    INDEX_FILE,
    WEIGHTS_FILE,
    TensorHeader,
    has_weights,
    headers_by_file,
    read_object,
)

_MORE_TEMPLATES = "additional_chat_templates"
_OF_OTHER_WEIGHTS = ("*.index.json", "adapter_config.json")
"""Small files that speak of weights that are not written along."""
_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Of tensors that are written as the checkpoint has them, as PyTorch calls them. The smaller ones need scales."""
_EMBEDDING = re.compile(r"((?:.*\.)?)model\.(?:language_model\.)?embed_tokens\.weight")
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
    _fill(folder, tensors, checkpoint, complete=True)


def write_some(tensors: Mapping[str, Any], folder: Path, *, checkpoint: Path | None, untied_head: bool = False) -> None:
    """Fill a folder with ``tensors`` alone, and what is beside the weights of ``checkpoint``.

    Without PyTorch, numpy arrays are written in the types that they have.

    Tensors are all numpy or all torch; the folder is empty. ``untied_head`` writes an output head that is the
    embeddings under its own name, too: vLLM keeps its old one otherwise when it reloads.

    Raises:
        CheckpointError: If the checkpoint is not what it was.
        OSError: If it cannot be written.
    """
    _fill(folder, _with_head(tensors) if untied_head else tensors, checkpoint)


def _fill(folder: Path, tensors: Mapping[str, Any], checkpoint: Path | None, *, complete: bool = False) -> None:
    by_file: Mapping[str, Mapping[str, TensorHeader]] = {}
    if checkpoint is not None:
        _copy_beside(checkpoint, folder)
        by_file = headers_by_file(checkpoint) if has_weights(checkpoint) else {}
    stored = {name: header for headers in by_file.values() for name, header in headers.items()}
    files = {file: [name for name in headers if complete or name in tensors] for file, headers in by_file.items()}
    new = [name for name in tensors if name not in stored]
    stored |= {_head_of(name): stored[name] for name in stored if _head_of(name) not in stored}
    if new:
        files.setdefault(next(reversed(files), WEIGHTS_FILE), []).extend(new)
    files = {file: names for file, names in files.items() if names}
    num_bytes = 0
    for file, names in files.items():
        chosen = {name: tensors[name] for name in names if name in tensors}
        if checkpoint is not None and len(chosen) < len(names):
            chosen |= _read(checkpoint, file, set(names) - chosen.keys())
        num_bytes += _save(chosen, folder / file, stored=stored)
    if files.keys() != {WEIGHTS_FILE}:
        _write_index(folder, files, checkpoint, num_bytes=num_bytes)


def _with_head(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return tensors with the head of a model that has none beside its embeddings, which it is then tied to."""
    heads = {_head_of(name): tensor for name, tensor in tensors.items() if _EMBEDDING.fullmatch(name)}
    return {**heads, **tensors}


def _head_of(embedding: str) -> str:
    return _EMBEDDING.sub(r"\1lm_head.weight", embedding)


def _copy_beside(checkpoint: Path, folder: Path) -> None:
    for path in (path for pattern in BESIDE_WEIGHTS for path in checkpoint.glob(pattern)):
        if path.is_file() and not any(map(path.match, _OF_OTHER_WEIGHTS)):
            shutil.copyfile(path, folder / path.name)
    if (checkpoint / _MORE_TEMPLATES).is_dir():
        shutil.copytree(checkpoint / _MORE_TEMPLATES, folder / _MORE_TEMPLATES)


def _read(checkpoint: Path, file: str, names: Iterable[str]) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(checkpoint / file, framework="pt") as reader:
        return {name: reader.get_tensor(name) for name in names}


def _save(tensors: Mapping[str, Any], path: Path, *, stored: Mapping[str, TensorHeader]) -> int:
    """Write a file, each tensor in the type it is stored in, and return how many bytes its tensors have."""
    from safetensors import SafetensorError

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not _has_torch():
            import numpy as np
            from safetensors.numpy import save_file

            arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
            save_file(arrays, path, metadata=_METADATA)
            return sum(array.nbytes for array in arrays.values())
        from safetensors.torch import save_file as save_torch

        typed = {name: _typed(tensor, stored.get(name)) for name, tensor in tensors.items()}
        save_torch(typed, path, metadata=_METADATA)
        return sum(tensor.nbytes for tensor in typed.values())
    except SafetensorError as error:  # what it calls a full disk
        raise OSError(str(error)) from error


def _typed(tensor: Any, header: TensorHeader | None) -> Any:
    """Return a tensor of PyTorch with memory of its own, in the type that the checkpoint has it in."""
    import torch

    given = torch.as_tensor(tensor).detach().cpu()
    name = _TYPES.get(header.dtype) if header is not None and given.is_floating_point() else None
    # The format has no two names for one memory, which tied weights are; hence the copies.
    return given.to(getattr(torch, name) if name else given.dtype, copy=True).contiguous()


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _write_index(folder: Path, files: Mapping[str, list[str]], checkpoint: Path | None, *, num_bytes: int) -> None:
    of_checkpoint = read_object(checkpoint / INDEX_FILE).get("metadata") if checkpoint is not None else None
    index = {
        "metadata": {**(of_checkpoint or {}), "total_size": num_bytes},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / INDEX_FILE).write_text(text, encoding="utf-8")
