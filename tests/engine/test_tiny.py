"""The model that is made on the spot: the same from the same settings, and one that transformers loads."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.numpy import load_file

from rollfeed.app import load_settings_model
from rollfeed.config import TinyModelSettings, validate_settings
from rollfeed.engine.tiny import tiny_checkpoint
from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.prompts import load_tokenizer

SMALL = TinyModelSettings(characters="abc :=\n", hidden_size=16, num_layers=2, num_heads=2)
FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_same_settings_and_seed_give_the_same_model(tmp_path: Path) -> None:
    first = tiny_checkpoint(SMALL, seed=3, cache_directory=tmp_path / "first")
    second = tiny_checkpoint(SMALL, seed=3, cache_directory=tmp_path / "second")
    assert first.name == second.name
    assert sorted(contents(first)) == FILES
    assert contents(first) == contents(second)


def test_a_model_that_is_there_is_used_as_it_is(tmp_path: Path) -> None:
    folder = tiny_checkpoint(SMALL, seed=3, cache_directory=tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert tiny_checkpoint(SMALL, seed=3, cache_directory=tmp_path) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]


def test_another_seed_gives_other_weights_and_the_same_tokenizer(tmp_path: Path) -> None:
    folders = [tiny_checkpoint(SMALL, seed=seed, cache_directory=tmp_path) for seed in (3, 4)]
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    assert first.keys() == second.keys()
    drawn = [name for name in first if not name.endswith("norm.weight")]
    assert all((first[name] != second[name]).any() for name in drawn)
    assert folders[0] != folders[1]
    assert (folders[0] / "tokenizer.json").read_bytes() == (folders[1] / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    "changes", [{"characters": "abd :=\n"}, {"characters": "bac :=\n"}, {"num_layers": 1}, {"hidden_size": 32}]
)
def test_other_settings_give_another_folder(tmp_path: Path, changes: dict[str, object]) -> None:
    other = TinyModelSettings.model_validate({**SMALL.model_dump(), **changes})
    folders = [tiny_checkpoint(each, seed=3, cache_directory=tmp_path) for each in (SMALL, other)]
    assert folders[0] != folders[1]


def test_transformers_loads_all_its_weights(tmp_path: Path) -> None:
    folder = tiny_checkpoint(SMALL, seed=3, cache_directory=tmp_path)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    vocab_size = 2 + len(SMALL.characters)
    assert tuple(model.get_input_embeddings().weight.shape) == (vocab_size, 16)
    logits = model(torch.tensor([[2, 3, 4]])).logits
    assert logits.shape == (1, 3, vocab_size)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    "characters", [SMALL.characters, TinyModelSettings().characters, "aé€𝄞<end>".replace("e", "E")]
)
def test_every_character_is_one_token_and_comes_back(tmp_path: Path, characters: str) -> None:
    settings = TinyModelSettings(characters=characters, hidden_size=16, num_layers=1, num_heads=2)
    folder = tiny_checkpoint(settings, seed=0, cache_directory=tmp_path)
    text = f"{characters}{characters[::-1]}{characters[:2] * 3}"
    for tokenizer in (
        load_tokenizer(folder),
        transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True),
    ):
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        assert ids == [2 + characters.index(character) for character in text]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_what_it_does_not_know_is_the_unknown_token_and_the_end_is_a_token_of_its_own(tmp_path: Path) -> None:
    folder = tiny_checkpoint(SMALL, seed=0, cache_directory=tmp_path)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("aZ€b", add_special_tokens=True).tolist() == [2, 1, 1, 3]
    assert tokenizer.eos_token_ids == (0,)
    assert not tokenizer.has_chat_template
    assert tokenizer.decode([2, 1, 3, 0], skip_special_tokens=True) == "ab"
    assert tokenizer.decode([2, 1, 3, 0], skip_special_tokens=False) == "a<unknown>b<end>"


@pytest.mark.parametrize(
    ("tiny", "expected"),
    [
        ({"characters": "abca"}, ["model.tiny.characters", "'a' is in it twice", "leave one out"]),
        ({"characters": ""}, ["model.tiny.characters"]),
        (
            {"hidden_size": 36, "num_heads": 4},
            ["model.tiny", "hidden_size = 36", "num_heads = 4", "change one of them"],
        ),
        ({"num_heads": 3}, ["model.tiny", "hidden_size = 64", "num_heads = 3"]),
        ({"width": 3}, ["model.tiny.width"]),
    ],
)
def test_settings_that_no_model_can_be_made_of(tiny: dict[str, object], expected: list[str]) -> None:
    sections = {"model": {"checkpoint": "tiny", "tiny": tiny}, "prompts": {"environments": [{"id": "core/copy_text"}]}}
    with pytest.raises(ConfigError) as caught:
        validate_settings(sections, where="run.toml", overrides=())
    for part in expected:
        assert part in str(caught.value)


def test_a_settings_file_names_it_and_its_seed_is_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sections = {
        "model": {"checkpoint": "tiny", "tiny": SMALL.model_dump()},
        "plugins": {"prompt_source": "mine:source"},
    }
    models = [
        load_settings_model(validate_settings({**sections, "seed": seed}, where="run.toml", overrides=()))
        for seed in (3, 4, 3)
    ]
    assert models[0].checkpoint == models[2].checkpoint != models[1].checkpoint
    assert models[0].checkpoint == tiny_checkpoint(SMALL, seed=3)
    assert models[0].checkpoint.is_relative_to(tmp_path)
    assert models[0].tokenizer.eos_token_ids == (0,)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"file/models: cannot keep the model there.*set XDG_CACHE_HOME"):
        tiny_checkpoint(SMALL, seed=3, cache_directory=tmp_path / "file" / "models")


@pytest.mark.parametrize("room_bytes", [100, 1500, 5000])
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, room_bytes: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot keep the model there.*File too large"):
            tiny_checkpoint(SMALL, seed=3, cache_directory=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_threads_that_make_it_at_once_all_get_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        making = [pool.submit(tiny_checkpoint, SMALL, seed=3, cache_directory=tmp_path) for _ in range(8)]
        folders = {future.result() for future in making}
    assert len(folders) == 1
    assert list(tmp_path.iterdir()) == list(folders)
    assert sorted(contents(folders.pop())) == FILES


PROGRAM = """
import sys
from pathlib import Path
from rollfeed.config import TinyModelSettings
from rollfeed.engine.tiny import tiny_checkpoint

settings = TinyModelSettings.model_validate_json(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(tiny_checkpoint(settings, seed=3, cache_directory=Path(sys.argv[2])).name, flush=True)
"""


def test_processes_that_make_it_at_once_both_get_it(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, SMALL.model_dump_json(), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        names = {process.communicate("go\n")[0].strip() for process in processes}
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    assert names == {path.name for path in tmp_path.iterdir()}
    assert sorted(contents(tmp_path / names.pop())) == FILES
