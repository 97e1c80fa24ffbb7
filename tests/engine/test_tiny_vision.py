"""The model with pictures that is made on the spot: transformers loads it and its processor, and pictures count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from rollfeed.app import load_settings_model
from rollfeed.config import TinyModelSettings, validate_settings
from rollfeed.engine.tiny_vision import tiny_vision_checkpoint
from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.model_files import read_config, read_headers
from rollfeed.model_files.loading import check_model
from rollfeed.model_files.names import CheckpointNames
from rollfeed.model_files.trial import load_tried

SMALL = TinyModelSettings(
    characters="abc ?\n", words=["red", "blue"], hidden_size=16, num_layers=1, num_heads=2, image_size=12, patch_size=4
)
NUM_PATCHES = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_checkpoint(SMALL, seed=3, cache_directory=tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_tried(folder, dtype=torch.float32, generates=True)


def picture(red: int, green: int, blue: int) -> Image.Image:
    return Image.fromarray(np.full((20, 30, 3), [red, green, blue], np.uint8))


def test_the_same_settings_and_seed_give_the_same_files(folder: Path, tmp_path: Path) -> None:
    again = tiny_vision_checkpoint(SMALL, seed=3, cache_directory=tmp_path)
    assert again.name == folder.name
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert tiny_vision_checkpoint(SMALL, seed=4, cache_directory=tmp_path) != again


def test_its_weights_have_the_names_of_its_file_both_ways(folder: Path, model: Any) -> None:
    check_model(folder)
    stored, names = load_file(folder / "model.safetensors"), CheckpointNames(model, read_headers(folder))
    now = names.tensors()
    assert now.keys() == stored.keys()
    assert all(torch.equal(now[name], stored[name]) for name in stored)
    converted = names.convert(stored)
    assert converted.keys() | {"lm_head.weight"} == model.state_dict().keys()


def test_its_processor_makes_a_token_of_each_patch_and_pictures_change_what_it_says(folder: Path, model: Any) -> None:
    processor: Any = transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
    said = []
    for colour in ((255, 0, 0), (255, 0, 0), (0, 0, 255)):
        inputs = processor(text=["<image>red?"], images=[picture(*colour)], return_tensors="pt")
        image_token = model.config.image_token_id
        assert inputs["input_ids"][0].tolist() == [image_token] * NUM_PATCHES + processor.tokenizer.encode("red?")
        assert tuple(inputs["pixel_values"].shape) == (1, 3, 12, 12)
        with torch.no_grad():
            said.append(model(**inputs).logits[0, -1].log_softmax(dim=-1))
    assert torch.equal(said[0], said[1])
    assert float((said[0] - said[2]).abs().max()) > 0.01


def test_a_word_is_one_token_wherever_it_stands(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tokenizer.encode("a redbluered?", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", " ", "red", "blue", "red", "?"]
    assert tokenizer.decode(ids) == "a redbluered?"


@pytest.mark.parametrize(
    ("tiny", "expected"),
    [
        ({"image_size": 20, "patch_size": 8}, ["image_size = 20", "patch_size = 8", "change one of them"]),
        ({"words": ["a"]}, ["model.tiny.words", "'a'", "two characters at least"]),
        ({"words": ["red", "red"]}, ["model.tiny.words", "'red'", "is there once"]),
    ],
)
def test_settings_that_no_model_can_be_made_of(tiny: dict[str, object], expected: list[str]) -> None:
    sections = {"model": {"checkpoint": "tiny-vision", "tiny": tiny}, "plugins": {"prompt_source": "mine:source"}}
    with pytest.raises(ConfigError) as caught:
        validate_settings(sections, where="run.toml", overrides=())
    for part in expected:
        assert part in str(caught.value)


def test_a_settings_file_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sections = {
        "seed": 5,
        "model": {"checkpoint": "tiny-vision", "tiny": SMALL.model_dump(mode="json")},
        "plugins": {"prompt_source": "mine:source"},
    }
    found = load_settings_model(validate_settings(sections, where="run.toml", overrides=()))
    assert found.checkpoint == tiny_vision_checkpoint(SMALL, seed=5)
    assert read_config(found.checkpoint)["model_type"] == "llava"


def test_a_model_of_another_kind_with_the_same_ending_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}')
    with pytest.raises(CheckpointError, match="not a causal language model"):
        read_config(tmp_path)
