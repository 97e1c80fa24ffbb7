"""Checkpoint folders, written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.weights.transports.delta.folders import FolderMaker


@pytest.fixture
def folder_of(tmp_path: Path) -> FolderMaker:
    """Write a checkpoint folder, in one file or in two."""

    def make(name: str, tensors: dict[str, torch.Tensor], *, files: int = 1, **others: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        names = sorted(tensors)
        for number in range(files):
            chosen: dict[str, Any] = {each: tensors[each] for each in names[number::files]}
            save_file(chosen, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
        for file, text in {"config.json": "{}", "empty.txt": "", **others}.items():
            path = folder / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return folder

    return make
