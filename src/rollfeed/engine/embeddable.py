"""Checks for the embedded engine that need no PyTorch, which takes longer to import than they take."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollfeed.config import EngineSettings
from rollfeed.engine.backends.architecture import Architecture, unsupported_reason
from rollfeed.engine.backends.native.library import NativeUnavailableError, load_library
from rollfeed.errors import ConfigError
from rollfeed.model_files import CONFIG_FILE, check_tensors, read_config, read_headers, refusal

TIED = ("model.embed_tokens.weight", "lm_head.weight")
"""One weight where the configuration ties them and the checkpoint does not bring two."""


def is_embeddable(checkpoint: Path, settings: EngineSettings) -> bool:
    """Return whether the embedded engine can serve a checkpoint on the CPU with its native kernels.

    False where only the engine itself can tell: on other devices, for other kernels, precisions and models.

    Raises:
        CheckpointError: As :func:`rollfeed.engine.local.create_local_engine`.
        ConfigError: As that.
    """
    if any(importlib.util.find_spec(name) is None for name in ("torch", "safetensors")):
        return False
    if settings.device != "cpu" or settings.kernels == "torch" or settings.precision not in ("auto", "fp32"):
        return False
    config, length = read_config(checkpoint), settings.context_length
    check_sizes(config, checkpoint, threads=settings.threads, num_slots=settings.num_slots, context_length=length)
    if unsupported_reason(config, context_length=length) is not None:
        return False
    _, brings_head = read_architecture(config, checkpoint)
    try:
        load_library()
    except NativeUnavailableError:
        return False
    return not brings_head


def read_architecture(config: Mapping[str, Any], checkpoint: Path) -> tuple[Architecture, bool]:
    """Return the dimensions of a checkpoint whose weights are there and have them.

    With them whether it brings a head of its own although the configuration says that there is none.

    Raises:
        CheckpointError: If a value of the configuration is not a model's, or a weight is missing or of another shape.
    """
    headers = read_headers(checkpoint)
    try:
        architecture = Architecture.from_config(config)
        shapes = architecture.weight_shapes()
    except KeyError as error:
        raise refusal(checkpoint / CONFIG_FILE, f"has no {error.args[0]}: fetch it again") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise refusal(checkpoint / CONFIG_FILE, f"has a value that is not a model's ({error})") from None
    check_tensors(checkpoint, headers, shapes, ties=[TIED] if architecture.tied_head else [])
    return architecture, architecture.tied_head and headers.keys() >= set(TIED)


def check_sizes(
    config: Mapping[str, Any], checkpoint: Path, *, threads: int, num_slots: int, context_length: int
) -> None:
    """Refuse sizes that are out of their range. Raises ConfigError with the first of them."""
    if threads < 0:
        raise ConfigError(f"threads = {threads}: must be at least 1, or 0 for the machine's cores")
    if num_slots < 1:
        raise ConfigError(f"num_slots = {num_slots}: must be at least 1")
    if context_length < 2:
        raise ConfigError(f"context_length = {context_length}: must be at least 2")
    limit = config.get("max_position_embeddings", config.get("n_positions"))
    if isinstance(limit, int) and context_length > limit:
        raise ConfigError(f"context_length = {context_length}: the model in {checkpoint} allows at most {limit}")
