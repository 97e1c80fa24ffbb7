"""What ``config.json`` and ``generation_config.json`` say of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rollfeed.errors import CheckpointError
from rollfeed.model_files.content import read_object, refusal

_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
CONFIG_FILE = "config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a causal language model.

    Raises:
        CheckpointError: If it is missing, unreadable, or of another kind of model.
    """
    config = find_config(folder)
    if config is None:
        raise CheckpointError(f"{folder}: not a model folder, it has no {CONFIG_FILE}{_hint(folder)}")
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if not any(isinstance(name, str) and name.endswith(_CAUSAL_SUFFIXES) for name in names):
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: not a causal language model: architectures is {architectures!r}, not one of "
            "*ForCausalLM; give model.checkpoint one that is"
        )
    if not isinstance(config.get("model_type"), str):
        raise refusal(folder / CONFIG_FILE, "has no model_type: fetch it again, or add the one of the model")
    if "transformers_weights" in config:
        raise refusal(
            folder / CONFIG_FILE,
            "names a weight file of its own (transformers_weights), which servers do not load: call that file "
            "model.safetensors and remove the key",
        )
    return config


def find_config(folder: Path) -> dict[str, Any] | None:
    """Return the ``config.json`` of any model; None where there is none.

    Raises:
        CheckpointError: If it is unreadable.
    """
    path = folder / CONFIG_FILE
    return read_object(path) if os.path.lexists(path) else None


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a response by ``generation_config.json`` and ``config.json``: all that they name.

    Raises:
        CheckpointError: If one of the files is unreadable.
    """
    found: list[Any] = []
    for name in ("generation_config.json", CONFIG_FILE):
        config = read_object(folder / name) if os.path.lexists(folder / name) else {}
        for section in (config, config.get("text_config")):
            value = section.get("eos_token_id") if isinstance(section, dict) else None
            found.extend(value if isinstance(value, list) else [value])
    return tuple(dict.fromkeys(value for value in found if type(value) is int and value >= 0))


def _hint(folder: Path) -> str:
    """Return where else the model may be."""
    models = sorted(folder.glob(f"*/{CONFIG_FILE}")) or sorted(folder.glob(f"snapshots/*/{CONFIG_FILE}"))
    found = [path.parent for path in models] or sorted(folder.glob("*.gguf"))
    if os.path.exists(folder / "adapter_config.json"):
        return ", but that of an adapter: merge it into its base model first"
    return f"; give model.checkpoint = {str(found[0])!r}" if found else ""
