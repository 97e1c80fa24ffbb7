"""New weights on their way into an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Weights of one version, in some form; a transport may have a form of its own."""

    policy_version: int = field(kw_only=True)
    """Of the tokens sampled from now on."""


@dataclass(frozen=True, slots=True)
class TensorUpdate(WeightUpdate):
    """Weights as tensors; they may not change before the update has been applied."""

    tensors: Mapping[str, Any]
    """numpy or torch, by the checkpoint's names. Where servers generate: all that the model has."""


@dataclass(frozen=True, slots=True)
class FolderUpdate(WeightUpdate):
    """Weights in a checkpoint folder in Hugging Face layout, which whoever loads it can read."""

    folder: Path

    def folder_at(self, address: str) -> Path:
        """Return the path by which one server can read it."""
        del address
        return self.folder


@dataclass(frozen=True, slots=True)
class AdapterUpdate(WeightUpdate):
    """An adapter in peft's layout, beside weights that stay as they are: requests name it from now on."""

    folder: Path
    adapter_name: str
