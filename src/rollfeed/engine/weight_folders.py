"""New weights on disk, where the servers of an engine can read them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollfeed.errors import EngineProtocolError
from rollfeed.model_files import WEIGHTS_FILE

_KEPT_FOLDERS = 2
"""A worker that comes back late loads the last one; the one before may still be being read."""
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
_OF_OTHER_WEIGHTS = ("*.index.json", "adapter_config.json")
"""Small files that speak of weights that are not written along."""


class WeightFolders:
    """Checkpoint folders written here for servers to read.

    Without a folder of the user's they are temporary, which is enough for servers on this machine.
    """

    def __init__(self, folder: Path | None, *, checkpoint: Path | None) -> None:
        self._given = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._checkpoint = checkpoint
        self._written: list[Path] = []

    def write(self, tensors: Mapping[str, Any], *, policy_version: int) -> Path:
        """Write tensors, all numpy or all torch, with the checkpoint's configuration and tokenizer.

        Raises:
            EngineProtocolError: If they cannot be written.
        """
        try:
            root = self._root()
            folder = Path(tempfile.mkdtemp(prefix=f"version-{policy_version}-", dir=root))
            folder.chmod(0o755)
            _fill(folder, tensors, self._checkpoint)
        except OSError as error:
            raise EngineProtocolError(f"weights of version {policy_version} cannot be written: {error}") from error
        self._written.append(folder)
        while len(self._written) > _KEPT_FOLDERS:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)
        return folder

    def close(self) -> None:
        """Remove what is temporary."""
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _root(self) -> Path:
        if self._given is not None:
            self._given.mkdir(parents=True, exist_ok=True)
            return self._given.resolve()
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="rollfeed-weights-")
        return Path(self._temporary.name)


def write_checkpoint(tensors: Mapping[str, Any], folder: Path, *, checkpoint: Path) -> None:
    """Make a folder with ``tensors``, all numpy or all torch, and the configuration and tokenizer of ``checkpoint``.

    Raises:
        OSError: If it cannot be written, or is there.
    """
    folder.mkdir(parents=True)
    _fill(folder, tensors, checkpoint)


def _fill(folder: Path, tensors: Mapping[str, Any], checkpoint: Path | None) -> None:
    found = [path for pattern in _SMALL_FILES for path in checkpoint.glob(pattern)] if checkpoint is not None else []
    for path in found:
        if not any(map(path.match, _OF_OTHER_WEIGHTS)):
            shutil.copyfile(path, folder / path.name)
    _save(tensors, folder / WEIGHTS_FILE)


def _save(tensors: Mapping[str, Any], path: Path) -> None:
    from safetensors import SafetensorError

    try:
        _save_tensors(tensors, path)
    except SafetensorError as error:  # what it calls a full disk
        raise OSError(str(error)) from error


def _save_tensors(tensors: Mapping[str, Any], path: Path) -> None:
    if any(hasattr(tensor, "detach") for tensor in tensors.values()):
        from safetensors.torch import save_file as save_torch  # brings torch, which its tensors have brought already

        # The format has no two names for one memory, which tied weights are; hence the copies.
        save_torch({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
        return
    import numpy as np
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)
