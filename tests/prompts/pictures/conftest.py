"""A model that sees, and pictures in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rollfeed.config import TinyModelSettings
from rollfeed.engine.tiny_vision import tiny_vision_checkpoint
from rollfeed.prompts import ChatRenderer, load_tokenizer
from rollfeed.prompts.pictures import ModelPictures, PictureLoader
from rollfeed.prompts.pictures.picture_folder import PictureFolder

SETTINGS = TinyModelSettings(words=["red", "green"], num_heads=2)


@pytest.fixture(scope="session")
def vision_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_checkpoint(SETTINGS, seed=0, cache_directory=tmp_path_factory.mktemp("vision"))


@pytest.fixture
def store(tmp_path: Path) -> PictureFolder:
    return PictureFolder(tmp_path / "pictures")


@pytest.fixture
def loader(store: PictureFolder) -> PictureLoader:
    return PictureLoader(store)


@pytest.fixture
def pictures(vision_checkpoint: Path, store: PictureFolder) -> ModelPictures:
    return ModelPictures(vision_checkpoint, store)


@pytest.fixture
def renderer(vision_checkpoint: Path, loader: PictureLoader, pictures: ModelPictures) -> ChatRenderer:
    tokenizer = load_tokenizer(vision_checkpoint)
    return ChatRenderer(tokenizer, rollout_max_prompt_len=None, loader=loader, pictures=pictures)


@pytest.fixture
def draw(tmp_path: Path) -> Callable[..., Path]:
    """Write a picture of noise by a seed, and return its path."""

    def drawn(name: str, seed: int = 0, *, size: tuple[int, int] = (8, 6), mode: str = "RGB", **how: object) -> Path:
        pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
        path = tmp_path / name
        Image.fromarray(pixels).convert(mode).save(path, **how)
        return path

    return drawn
