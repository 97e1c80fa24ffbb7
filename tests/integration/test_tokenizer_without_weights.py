"""Servers have the weights: here a run needs the tokenizer only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KINDS = {
    "sglang": 'engine.sglang.workers=["http://127.0.0.1:9"]',
    "openai": 'engine.openai.base_url="http://127.0.0.1:9"',
}


@pytest.fixture
def tokenizer_only(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "tokenizer")
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_config", [True, False])
def test_check_needs_no_weights_where_servers_have_them(
    rollfeed: Callable[..., Any], settings_file: Callable[..., Path], tokenizer_only: Path, kind: str, with_config: bool
) -> None:
    if not with_config:
        (tokenizer_only / "config.json").unlink()
    options = ("--set", f"model.checkpoint={tokenizer_only}", "--set", KINDS[kind])
    result = rollfeed("check", settings_file(), *options)
    assert (result.code, result.err) == (0, "")
    result = rollfeed("check", settings_file(), "--set", f"model.checkpoint={tokenizer_only}")
    assert result.code == 2
    assert ("no *.safetensors weights" if with_config else "it has no config.json") in result.err


def test_training_needs_the_weights_here(
    rollfeed: Callable[..., Any], settings_file: Callable[..., Path], tokenizer_only: Path, tmp_path: Path
) -> None:
    options = ("--set", f"model.checkpoint={tokenizer_only}", "--set", KINDS["sglang"])
    file = settings_file("\n[train]\nthreads = 1\n")
    result = rollfeed("check", file, *options)
    assert result.code == 0
    assert "train    only rollfeed run: the model's weights are not here" in result.out
    assert json.loads(rollfeed("check", file, "--json", *options).out)["trains"] is False
    result = rollfeed("train", file, "--out", tmp_path / "out", *options)
    assert result.code == 2
    assert f"{tokenizer_only}: no weights, and training needs them here" in result.err
    assert not (tmp_path / "out").exists()


def test_weights_for_training_are_checked_with_servers_too(
    rollfeed: Callable[..., Any], settings_file: Callable[..., Path], tokenizer_only: Path
) -> None:
    (tokenizer_only / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    options = ("--set", f"model.checkpoint={tokenizer_only}", "--set", KINDS["sglang"])
    assert rollfeed("check", settings_file(), *options).code == 0
    result = rollfeed("check", settings_file("\n[train]\nthreads = 1\n"), *options)
    assert result.code == 2
    assert "model.safetensors is a Git LFS pointer, not the weights: run git lfs pull" in result.err
