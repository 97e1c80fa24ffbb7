"""Chat templates as model families have them, each over a small tokenizer with that family's special tokens.

Written from what the families' templates are known to do; the names say which behaviour is meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollfeed.prompts import LocalTokenizer, load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
_WORDS = (".\n\n", "the", "and", "call", "result", "think", "tool", "answer", "name", "  ", "\n\n", '{"', '": ')
"""Merged into tokens, so that a text can be tokenised in several ways."""


@dataclass(frozen=True, slots=True)
class Family:
    """One way of writing conversations."""

    name: str
    ends: tuple[str, ...]
    """Tokens that end a turn."""
    specials: tuple[str, ...] = ()
    bos: str | None = None
    thinks: bool = False
    """Whether the template knows thinking."""
    tools: bool = False
    """Whether it shows calls and results of tools."""
    max_calls: int = 2
    alternates: bool = False
    """Whether it refuses anything but question and answer in turn."""
    rewrites: bool = False
    """Whether it shows earlier turns anew when the conversation goes on, whatever was said."""

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8")


_CHATML = {"ends": ("<|im_end|>", "<|endoftext|>"), "specials": ("<|im_start|>",)}
FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", **_CHATML),
        Family("smollm2", **_CHATML),
        Family("qwen2.5", **_CHATML, tools=True),
        Family("qwen3", **_CHATML, tools=True, thinks=True),
        Family("qwen3.5", **_CHATML),
        Family(
            "llama3",
            ends=("<|eot_id|>", "<|eom_id|>"),
            specials=("<|start_header_id|>", "<|end_header_id|>"),
            bos="<|begin_of_text|>",
            tools=True,
            max_calls=1,
        ),
        Family(
            "mistral",
            ends=("</s>",),
            specials=("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            bos="<s>",
            tools=True,
            rewrites=True,
        ),
        Family("gemma", ends=("<end_of_turn>", "<eos>"), specials=("<start_of_turn>",), bos="<bos>", alternates=True),
        Family("phi", ends=("<|end|>", "<|endoftext|>"), specials=("<|system|>", "<|user|>", "<|assistant|>")),
        Family(
            "deepseek_r1",
            ends=("<\uff5cend▁of▁sentence\uff5c>",),
            specials=(
                "<\uff5cUser\uff5c>",
                "<\uff5cAssistant\uff5c>",
                "<\uff5ctool▁output▁begin\uff5c>",
                "<\uff5ctool▁output▁end\uff5c>",
            ),
            bos="<\uff5cbegin▁of▁sentence\uff5c>",
            thinks=True,
        ),
        Family(
            "glm4",
            ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
            specials=("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
            tools=True,
        ),
        Family("merged_results", ends=("<|end|>",), specials=("<|turn|>",), tools=True),
        Family("numbered", ends=("<|end|>",), specials=("<|turn|>",)),
        Family("counted", ends=("<|end|>",), specials=("<|turn|>",), rewrites=True),
        Family("plain", ends=("<|endoftext|>",)),
    )
}


@cache
def load(name: str) -> LocalTokenizer:
    """Return a family's tokenizer: bytes, a few words, and the special tokens."""
    with TemporaryDirectory() as folder:
        save(FAMILIES[name], Path(folder))
        return load_tokenizer(Path(folder))


def save(family: Family, folder: Path) -> None:
    """Write a family's tokenizer as a checkpoint has it, without a model."""
    specials = dict.fromkeys([*family.ends, *family.specials, *([family.bos] if family.bos else [])])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*specials, *alphabet])}
    merges: list[tuple[str, str]] = []
    coder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in _WORDS:
        ((whole, _),) = coder.pre_tokenize_str(word)
        for length in range(2, len(whole) + 1):
            if whole[:length] not in vocabulary:
                vocabulary[whole[:length]] = len(vocabulary)
                merges.append((whole[: length - 1], whole[length - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = coder
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.ends[0],
        bos_token=family.bos,
        additional_special_tokens=list(specials),
        chat_template=family.template,
    ).save_pretrained(folder)
    ids = [vocabulary[token] for token in family.ends]
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
