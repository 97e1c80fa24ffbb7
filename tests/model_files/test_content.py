from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollfeed.errors import CheckpointError
from rollfeed.model_files import read_config, read_eos_token_ids


def write(folder: Path, **values: Any) -> None:
    folder.mkdir(exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **values}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "config.json is a Git LFS pointer, not the file itself"),
        (b"<html>404", "config.json is a web page"),
        (b"", "config.json is empty"),
        (b"{", "config.json is not JSON, or cut short"),
        (b"3", "config.json is not a JSON object"),
        (b"{}", "config.json: not a causal language model: architectures is None"),
        (b'{"architectures": ["BertModel"], "model_type": "bert"}', "architectures is ['BertModel']"),
        (b'{"architectures": ["LlamaForCausalLM"]}', "config.json has no model_type"),
        (
            b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "transformers_weights": "w.safetensors"}',
            "names a weight file of its own (transformers_weights)",
        ),
    ],
)
def test_a_configuration_that_is_none_says_why(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_configuration_says_where_one_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it has no config\.json$"):
        read_config(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"give model\.checkpoint = '.*/model\.gguf'"):
        read_config(tmp_path)
    write(tmp_path / "checkpoint-500")
    with pytest.raises(CheckpointError, match=r"give model\.checkpoint = '.*/checkpoint-500'"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="that of an adapter: merge it into its base model"):
        read_config(tmp_path)


def test_a_link_that_leads_nowhere_is_no_missing_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("../blobs/1")
    with pytest.raises(CheckpointError, match=r"config\.json is a link to a file that is not there"):
        read_config(tmp_path)


def test_all_ids_that_the_configurations_name_end_a_response(tmp_path: Path) -> None:
    assert read_eos_token_ids(tmp_path) == ()
    write(tmp_path, eos_token_id=7)
    assert read_eos_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6, 5]}')
    assert read_eos_token_ids(tmp_path) == (5, 6, 7)
    write(tmp_path, eos_token_id=None, text_config={"eos_token_id": [8, 6]})
    assert read_eos_token_ids(tmp_path) == (5, 6, 8)
    for value in ("true", '"5"', "-1", "null", "2.5"):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
        assert read_eos_token_ids(tmp_path) == (8, 6)
