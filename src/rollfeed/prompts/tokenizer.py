"""A model's tokenizer and chat template, from a local folder and without PyTorch."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.types import Message

_WHOLE_IN_ONE_FILE = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of ``tokenizer_config.json`` that add nothing to ``tokenizer.json``."""


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> LocalTokenizer:
    """Load the tokenizer of a checkpoint folder; nothing is fetched.

    Args:
        folder: With ``tokenizer.json`` or what the tokenizer's class needs, and optionally ``config.json`` and
            ``generation_config.json``.
        trust_remote_code: Run Python code that lies in the folder, where the tokenizer is defined by it.

    Raises:
        CheckpointError: If the folder has no tokenizer that can be loaded, or only one that needs code of its own.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder of a checkpoint with its tokenizer")
    try:
        tokenizer = _loader(folder).from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises plain Exception
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{folder}: its tokenizer needs Python code that lies in the folder: "
                "read that code, then set trust_remote_code = true"
            ) from error
        message = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{folder}: cannot load a tokenizer from it: {message}") from error
    return LocalTokenizer(tokenizer, eos_token_ids=_eos_token_ids(folder, tokenizer.eos_token_id))


def _loader(folder: Path) -> Any:
    """Return the transformers class that loads a folder's tokenizer.

    The general one imports PyTorch on its way, which takes seconds; where ``tokenizer.json`` says everything, it is not
    needed. Imported here, so that commands that load no model do not pay for it.
    """
    config = _read_json(folder / "tokenizer_config.json")
    is_whole = (folder / "tokenizer.json").exists() and config.get("tokenizer_class") in _WHOLE_IN_ONE_FILE
    if is_whole and "auto_map" not in config:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


class LocalTokenizer:
    """A transformers tokenizer that several threads may use at once."""

    def __init__(self, tokenizer: Any, *, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        # Fast tokenizers raise "Already borrowed" when two threads meet inside.
        self._lock = threading.Lock()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response: the tokenizer's, then those of the checkpoint's configuration."""
        return self._eos_token_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`render_chat` can be used."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        """Return token ids ``(P,)``. Rendered chat text takes ``add_special_tokens=False``."""
        with self._lock:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return np.asarray(ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | NDArray[np.int32], *, skip_special_tokens: bool) -> str:
        """Return text; bytes that are not complete UTF-8 become U+FFFD."""
        ids = [int(token_id) for token_id in token_ids]
        with self._lock:
            text = self._tokenizer.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return str(text)

    def render_chat(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return the chat template's text, the assistant's opening included.

        Raises:
            ConfigError: If there is no chat template, or it refuses the messages.
        """
        if not self.has_chat_template:
            raise ConfigError("the model has no chat template: set apply_chat_template = false, or use a chat model")
        try:
            with self._lock:
                text = self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=None if tools is None else [dict(tool) for tool in tools],
                    tokenize=False,
                    add_generation_prompt=True,
                )
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(f"the model's chat template refuses the messages: {error}") from error
        return str(text)


def _eos_token_ids(folder: Path, own: int | None) -> tuple[int, ...]:
    """Return every end-of-sequence id that the tokenizer or the configuration files name."""
    found: list[Any] = [own]
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        for section in (config, config.get("text_config")):
            value = section.get("eos_token_id") if isinstance(section, dict) else None
            found.extend(value if isinstance(value, list) else [value])
    return tuple(dict.fromkeys(value for value in found if isinstance(value, int) and not isinstance(value, bool)))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: must be a JSON object, is a {type(config).__name__}")
    return config
