"""A tokenizer of one token a byte, saved as a checkpoint folder would have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rollfeed.prompts import ChatRenderer, load_tokenizer

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}</turn>"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def save_tokenizer() -> Callable[..., Path]:
    def save(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, **configs: object) -> Path:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens(["<bos>", "<eos>", "<turn>", "</turn>"])
        core.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", core.token_to_id("<bos>"))]
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
        tokenizer.chat_template = chat_template
        tokenizer.save_pretrained(folder)
        for name, config in configs.items():
            (folder / f"{name}.json").write_text(json.dumps(config))
        return folder

    return save


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, save_tokenizer: Callable[..., Path]) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def renderer(tokenizer_folder: Path) -> ChatRenderer:
    return ChatRenderer(load_tokenizer(tokenizer_folder), rollout_max_prompt_len=None)


@pytest.fixture(scope="session")
def make_renderer(tokenizer_folder: Path) -> Callable[[int], ChatRenderer]:
    tokenizer = load_tokenizer(tokenizer_folder)
    return lambda limit: ChatRenderer(tokenizer, rollout_max_prompt_len=limit)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(rows: list[object], name: str = "train.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return str(path)

    return write
