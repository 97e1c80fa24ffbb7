"""A model's tokenizer and chat template, from a local folder and without PyTorch; from a question to token ids.

Invariant: a prompt has the special tokens its template or its tokenizer puts there, once: rendered chat text is
encoded without adding any, raw text with those that the tokenizer puts before it, unless it begins with them.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.conversations import call_syntax
from rollfeed.conversations.picture_places import Placing, needed
from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.model_files import check_content, read_eos_token_ids, read_object
from rollfeed.prompts.asking import asked
from rollfeed.prompts.chat_template import NO_TEMPLATE, ChatTemplate, check_template
from rollfeed.prompts.plain_tokenizer import PlainTokenizer, plain_tokenizer
from rollfeed.protocols import (
    AnswerMarker,
    CallFormat,
    PictureLoading,
    PictureProcessor,
    PromptPreprocessor,
    Rendered,
    Tokenizer,
)
from rollfeed.types import Message, Picture
from rollfeed.types.text import well_formed

_WHOLE_IN_ONE_FILE = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of ``tokenizer_config.json`` that add nothing to ``tokenizer.json``."""
_PROBES = ("a", "0", " ", "=")
"""Texts of which a tokenizer knows one."""

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""What a tokenizer may be made of; one that is a pointer or a broken link would be passed over, or misread."""

_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "*.py")


def load_tokenizer(
    folder: Path,
    *,
    trust_remote_code: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    chat_template: Path | None = None,
    template_date: datetime | None = None,
    samples: bool = True,
) -> LocalTokenizer:
    """Load the tokenizer of a checkpoint folder; nothing is fetched.

    Args:
        folder: With ``tokenizer.json`` or what the tokenizer's class needs, and optionally ``config.json`` and
            ``generation_config.json``.
        trust_remote_code: Run Python code that lies in the folder, where the tokenizer is defined by it.
        chat_template_kwargs: Variables of the chat template, such as ``enable_thinking``.
        chat_template: A file with another chat template than the checkpoint's.
        template_date: What a chat template is told that asks for the date; by default now. It never changes after.
        samples: Whether prompts will be answered; what only looks at them does without transformers where it can.

    Raises:
        CheckpointError: If the folder has no tokenizer that can be loaded, or only one that needs code of its own, or
            its chat template cannot be read.
        ConfigError: If a variable of the template is not to be set, or ``chat_template`` cannot be read.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder of a checkpoint with its tokenizer")
    for name in _FILES:
        if os.path.lexists(folder / name):
            check_content(folder / name)
    template = None if chat_template is None else _own_template(chat_template)
    try:
        tokenizer = _loaded(folder, trust_remote_code=trust_remote_code, template=template, samples=samples)
    except Exception as error:  # the tokenizers library raises plain Exception
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{folder}: its tokenizer needs Python code that lies in the folder: "
                "read that code, then set trust_remote_code = true"
            ) from error
        if not any(any(folder.glob(pattern)) for pattern in _VOCABULARIES):
            raise CheckpointError(
                f"{folder}: no tokenizer: put the model's tokenizer.json and tokenizer_config.json there"
            ) from error
        message = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{folder}: cannot load a tokenizer from it: {message}") from error
    if template is not None:
        tokenizer.chat_template = template
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return LocalTokenizer(
        tokenizer,
        eos_token_ids=tuple(dict.fromkeys((*own, *read_eos_token_ids(folder)))),
        chat_template=ChatTemplate(
            tokenizer, arguments=chat_template_kwargs or {}, date=template_date or datetime.now().replace(microsecond=0)
        ),
    )


def _own_template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        check_template(text)
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).partition("; mend it")[0]
        raise ConfigError(
            f"model.chat_template = {str(path)!r}: cannot be read ({reason}): give a file with one"
        ) from None
    return text


def _loaded(folder: Path, *, trust_remote_code: bool, template: str | None, samples: bool) -> Any:
    """Return a folder's tokenizer as transformers loads it, or one that does as that.

    The general one imports PyTorch on its way, which takes seconds; where ``tokenizer.json`` says everything, it is not
    needed. Imported here, so that commands that load no model do not pay for it.
    """
    path = folder / "tokenizer_config.json"
    config = read_object(path) if path.exists() else {}
    if find_spec("torch") is None:  # which transformers would tell everybody, and tokenizers do not need
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    is_whole = (folder / "tokenizer.json").exists() and config.get("tokenizer_class") in _WHOLE_IN_ONE_FILE
    is_whole = is_whole and "auto_map" not in config

    def load() -> Any:
        name = "PreTrainedTokenizerFast" if is_whole else "AutoTokenizer"
        loader = getattr(importlib.import_module("transformers"), name)
        return loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)

    plain = plain_tokenizer(folder, chat_template=template, load=load) if is_whole and not samples else None
    return load() if plain is None else plain


class LocalTokenizer:
    """A transformers tokenizer that several threads may use at once."""

    def __init__(self, tokenizer: Any, *, eos_token_ids: tuple[int, ...], chat_template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self._chat_template = chat_template
        self._prefix = _what_comes_before(tokenizer)
        self._backend = _plain_backend(tokenizer)
        # Fast tokenizers raise "Already borrowed" when two threads meet inside.
        self._lock = threading.Lock()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_template)

    @property
    def template_date(self) -> datetime | None:
        """The date that the chat template is told; None where it does not ask."""
        return self._chat_template.date if self._chat_template.asks_for_the_date else None

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens, special ones too, by how the tokenizer writes them."""
        tokenizer = self._tokenizer
        with self._lock:
            found = tokenizer.backend_tokenizer.get_vocab() if tokenizer.is_fast else tokenizer.get_vocab()
        return dict(found)

    def has_template_of(self, other: LocalTokenizer) -> bool:
        """Whether the chat template is another tokenizer's, or neither has one."""
        return bool((self._tokenizer.chat_template or None) == (other._tokenizer.chat_template or None))

    def encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        """Return token ids ``(P,)``. Rendered chat text takes ``add_special_tokens=False``.

        Special tokens are those that the tokenizer puts before a text, unless it begins with them; what ends a text
        does not belong behind one that is to be gone on with.
        """
        with self._lock:
            if self._backend is None:
                ids = self._tokenizer.encode(well_formed(text), add_special_tokens=False, verbose=False)
            else:
                ids = self._backend.encode_batch_fast([well_formed(text)], add_special_tokens=False)[0].ids
        prefix = self._prefix if add_special_tokens else []
        begins_with_it = bool(prefix) and ids[: len(prefix)] == prefix
        return np.asarray(ids if begins_with_it else prefix + ids, dtype=np.int32)

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        if not self._tokenizer.is_fast:
            raise ConfigError("the model's tokenizer does not tell where its tokens are: it needs a tokenizer.json")
        with self._lock:
            encoded = self._tokenizer(
                well_formed(text), add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        return np.asarray(encoded["input_ids"], np.int32), offsets

    def decode(self, token_ids: Sequence[int] | NDArray[np.int32], *, skip_special_tokens: bool) -> str:
        ids = np.asarray(token_ids, np.int64).tolist()
        with self._lock:
            if self._backend is not None:
                return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
            text = self._tokenizer.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return str(text)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        num_images: int = 0,
        add_generation_prompt: bool = True,
    ) -> str:
        with self._lock:
            return self._chat_template.render(
                messages,
                tools=tools,
                arguments=template_kwargs,
                num_images=num_images,
                add_generation_prompt=add_generation_prompt,
            )


def _plain_backend(tokenizer: Any) -> Any:
    """Return the object of the tokenizers library that does the same without the checks around it, or None.

    They take longer than the tokens of a short text.
    """
    if isinstance(tokenizer, PlainTokenizer):
        return tokenizer.backend_tokenizer
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    changed = any(
        getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name) for name in ("_encode_plus", "_decode")
    )
    if changed or not tokenizer.is_fast or tokenizer.split_special_tokens:
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


def _what_comes_before(tokenizer: Any) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text, such as BOS."""
    for text in _PROBES:
        plain, whole = (tokenizer.encode(text, add_special_tokens=special, verbose=False) for special in (False, True))
        for start in range(len(whole) - len(plain) + 1) if plain else ():
            if whole[start : start + len(plain)] == plain:
                return list(whole[:start])
    return []


class ChatRenderer:
    """Renders through the tokenizer's chat template, or takes text as it is.

    Args:
        tokenizer: Of the model that will answer.
        rollout_max_prompt_len: The longest prompt, in tokens; None for any.
        tools: Definitions of the run's tools, for prompts without their own.
        call_format: How the policy is told to call them where the chat template does not say it.
        preprocessor: The form of questions in text; messages stay as they are.
        marker: The marks in which questions in text ask for answers.
        system_prompt: Begins conversations that have no system message.
        loader: Loads pictures that parts of messages bring.
        pictures: Puts pictures into tokens; None where the model takes none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        rollout_max_prompt_len: int | None,
        tools: Sequence[Mapping[str, Any]] = (),
        call_format: CallFormat = CallFormat.AUTO,
        preprocessor: PromptPreprocessor | None = None,
        marker: AnswerMarker | None = None,
        system_prompt: str | None = None,
        loader: PictureLoading | None = None,
        pictures: PictureProcessor | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._rollout_max_prompt_len = rollout_max_prompt_len
        self._tools = tuple(tools)
        self._call_format = call_format
        self._preprocessor = preprocessor
        self._marker = marker
        self._system_prompt = system_prompt
        self.loader = loader
        self._pictures = pictures

    def render(
        self,
        content: str | Sequence[Message],
        *,
        apply_chat_template: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[Picture] = (),
        videos: Sequence[Sequence[Picture]] = (),
        folder: Path | None = None,
    ) -> Rendered:
        """Return the text, its tokens, and what they were made of; a string is one user turn of a chat.

        Tools of the run that the template does not show are told at the beginning of the first message.

        Raises:
            ConfigError: If the model has no chat template but one is to be applied, the template refuses the
                messages, messages come without a template, or nothing is left to send.
        """
        if isinstance(content, str):
            content = asked(content, self._preprocessor, self._marker)
        if self._system_prompt is not None and apply_chat_template:
            turns = ({"role": "user", "content": content},) if isinstance(content, str) else tuple(content)
            if not turns or turns[0].get("role") not in ("system", "developer"):
                content = ({"role": "system", "content": self._system_prompt}, *turns)
        if self._tools:
            tools = tuple(tools or self._tools)
            syntax = call_syntax(self._tokenizer, self._call_format, is_chat=apply_chat_template)
            content = syntax.introduced(content, tools)
        messages: tuple[Message, ...] | None = None
        placing = self._placing(images, videos, folder)
        if apply_chat_template:
            messages = ({"role": "user", "content": content},) if isinstance(content, str) else tuple(content)
            messages = placing.in_messages(messages)
            text = self._tokenizer.render_chat(messages, tools=tools, num_images=len(placing.pictures))
        elif isinstance(content, str):
            text = placing.in_text(well_formed(content), "<image>" if self._pictures is None else self._pictures.mark)
        else:
            raise ConfigError("a list of messages needs the chat template: set apply_chat_template = true")
        token_ids = self._tokenizer.encode(text, add_special_tokens=not apply_chat_template)
        if not len(token_ids):
            raise ConfigError("the prompt has no tokens")
        if placing.pictures and self._pictures is not None:
            token_ids = self._pictures.expand(token_ids, placing.pictures)
        token_ids.setflags(write=False)
        return Rendered(text, token_ids, messages, None if tools is None else tuple(tools), tuple(placing.pictures))

    def _placing(self, images: Sequence[Picture], videos: Sequence[Sequence[Picture]], folder: Path | None) -> Placing:
        return Placing(
            images,
            videos,
            load=lambda part: needed(self.loader).load(part, folder=folder),
            load_video=lambda part: needed(self.loader).load_video(part, folder=folder),
        )

    def check_template(self) -> None:
        if not self._tokenizer.has_chat_template:
            raise ConfigError(NO_TEMPLATE)

    def fits(self, token_ids: NDArray[np.int32]) -> bool:
        return self._rollout_max_prompt_len is None or len(token_ids) <= self._rollout_max_prompt_len
