"""A tokenizer of the tokenizers library alone, for what only looks at prompts: transformers takes longer to import.

Invariant: it does as transformers does with the same folder, or is not made; what it leaves out it asks transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_KNOWN = {
    *("backend", "chat_template", "clean_up_tokenization_spaces", "is_local", "local_files_only", "model_input_names"),
    *("model_max_length", "padding_side", "tokenizer_class", "truncation_side"),
    *_SPECIALS,
}
"""Keys of ``tokenizer_config.json`` that change nothing but what is read here."""
_OTHER_FILES = ("additional_chat_templates", "chat_template.json", "special_tokens_map.json", "added_tokens.json")
_BEYOND = re.compile(r"%[-+]?\s*generation\b|strftime_now|dict\(|documents")
"""Marks of templates that ask for more than is offered here."""
_MAX_VOCABULARY = 100_000
"""From there on transformers looks for a mistake in Mistral's tokenizers, and mends it."""


class PlainTokenizer:
    """Has those parts of a transformers tokenizer that prompts need; ``load`` loads the same with transformers."""

    is_fast, split_special_tokens = True, False

    def __init__(
        self, backend: Tokenizer, specials: dict[str, str], chat_template: str | None, load: Callable[[], Any]
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer = backend
        self.special_tokens_map = specials
        self.chat_template = chat_template
        self._load = load

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        token = self.special_tokens_map.get("eos_token")
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    @staticmethod
    def compile(text: str) -> Any:
        """Return a chat template, compiled as transformers does it. Raises TemplateSyntaxError if it is none."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        return environment.from_string(text)

    def __call__(self, text: str, **options: Any) -> Any:
        """Return what transformers does."""
        return self._whole(text, **options)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """Return what transformers does: messages may be more than texts."""
        return self._whole.apply_chat_template(messages, **options)

    @cached_property
    def _whole(self) -> Any:
        whole = self._load()
        whole.chat_template = self.chat_template
        return whole


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def plain_tokenizer(folder: Path, *, chat_template: str | None, load: Callable[[], Any]) -> PlainTokenizer | None:
    """Return the tokenizer of a folder whose ``tokenizer.json`` says everything; None where transformers may do more.

    ``chat_template`` takes the place of the folder's.

    Raises:
        Exception: If the file is no tokenizer.
    """
    # As transformers reads it, which takes UTF-8 only, and without the mark at its beginning.
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template_file = folder / "chat_template.jinja"
    if config.keys() - _KNOWN or any((folder / name).exists() for name in _OTHER_FILES):
        return None
    text = chat_template or config.get("chat_template")
    if chat_template is None and template_file.exists():
        text = template_file.read_text(encoding="utf-8")
    if text is not None and (type(text) is not str or _BEYOND.search(text)):
        return None
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    specials = {name: config[name] for name in _SPECIALS if config.get(name) is not None}
    if backend.get_vocab_size() > _MAX_VOCABULARY or not all(
        type(token) is str and token in added for token in specials.values()
    ):
        return None
    return PlainTokenizer(backend, specials, text, load)
