"""A tiny classifier on the spot: the tiny character model with a random head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rollfeed.config import TinyModelSettings
from rollfeed.engine.tiny import tiny_checkpoint
from rollfeed.prompts.tokenizer import LocalTokenizer, load_tokenizer

Classifier = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's folder; one layer of 32."""
    settings = TinyModelSettings(characters="abcdefghij.; ", hidden_size=32, num_layers=1, num_heads=2)
    return tiny_checkpoint(settings, seed=1, cache_directory=tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def policy_tokenizer(tiny_policy: Path) -> LocalTokenizer:
    return load_tokenizer(tiny_policy)


@pytest.fixture(scope="session")
def classifier(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    """Makes a classifier of so many labels, of whole texts or of tokens; weights that are 30 times as large differ."""

    def make(num_labels: int = 1, *, by_token: bool = False, **config: Any) -> Path:
        folder = tmp_path_factory.mktemp("classifier") / "model"
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((tiny_policy / name).read_bytes())
        about = json.loads((tiny_policy / "config.json").read_text())
        about["architectures"] = [f"LlamaFor{'Token' if by_token else 'Sequence'}Classification"]
        about["id2label"] = {str(number): f"LABEL_{number}" for number in range(num_labels)}
        about["label2id"] = {f"LABEL_{number}": number for number in range(num_labels)}
        (folder / "config.json").write_text(json.dumps({**about, **config}))
        weights = {name: 30 * array for name, array in load_file(tiny_policy / "model.safetensors").items()}
        weights = {name: array / 30 if "norm" in name else array for name, array in weights.items()}
        width = weights["model.norm.weight"].shape[0]
        weights["score.weight"] = np.random.default_rng(2).standard_normal((num_labels, width)).astype(np.float32)
        if by_token:
            weights["score.bias"] = np.arange(num_labels, dtype=np.float32)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make
