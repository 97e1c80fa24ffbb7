"""Files of a model's folder: what they are, from their first bytes, and what the configurations say of the model.

Every message begins with the folder, a colon and a space, so that who has said the folder already can leave it out.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec

from rollfeed.base.atomic import NotRegularError, open_regular
from rollfeed.errors import CheckpointError

_WEB_PAGE = "is a web page, not {what}: fetch the file again"
_FOREIGN = (
    (b"version https://git-lfs.github.com/", "is a Git LFS pointer, not {what}: run git lfs pull"),
    (b"<!doctype", _WEB_PAGE),
    (b"<html", _WEB_PAGE),
    (b"<?xml", _WEB_PAGE),
    (b"pk\x03\x04", "is a zip archive, as torch.save writes it, not {what}: convert the model with save_pretrained"),
)
"""How the files begin that stand where others should, in lower case, and what to say of them."""
_NUM_BYTES = 64
_WEIGHT_SUFFIXES = (".safetensors", ".gguf")


def check_regular(folder: Path, patterns: Iterable[str]) -> None:
    """Refuse a folder in which a pipe, a device or a socket has the name of a file: whoever opened it would wait.

    Links to what is not there, and names that cannot be looked at, are left to who reads them.

    Raises:
        CheckpointError: If there is one of a name that fits ``patterns``.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        named = [entry for entry in entries if any(fnmatch(entry.name, pattern) for pattern in patterns)]
        if wrong := next((entry for entry in named if not entry.is_dir() and not _is_file_or_gone(entry)), None):
            raise refusal(Path(wrong.path), "is no regular file, but a pipe, a device or a socket")


def _is_file_or_gone(entry: os.DirEntry[str]) -> bool:
    try:
        return stat.S_ISREG(entry.stat().st_mode)
    except OSError:
        return True


def check_content(path: Path) -> None:
    """Refuse what stands in a file's place without being it: a pointer, a web page, a folder, a pipe, a broken link.

    Raises:
        CheckpointError: If it cannot be read, or is something else.
    """
    start = _read_start(path).lstrip().lower()
    what = "the weights" if path.suffix in _WEIGHT_SUFFIXES else "the file itself"
    for sign, message in _FOREIGN:
        if start.startswith(sign):
            raise refusal(path, message.format(what=what))


def _read_start(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(_NUM_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file.

    Raises:
        CheckpointError: If it is missing, unreadable, something else, or cut short.
    """
    check_content(path)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    if not text.strip():
        raise refusal(path, "is empty: fetch it again")
    try:
        found = _decoded(text)
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"is not JSON, or cut short ({error}): fetch it again") from None
    if not isinstance(found, dict):
        raise refusal(path, "is not a JSON object")
    return found


def _decoded(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)  # several times as fast as the other, which vocabularies are worth
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return json.loads(text)  # takes NaN and other encodings too, and says where a mistake is


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return what to say of a file that cannot be opened."""
    if isinstance(error, FileNotFoundError):
        if path.is_symlink():
            return refusal(path, "is a link to a file that is not there: fetch the model again")
        return refusal(path, "is missing")
    if isinstance(error, IsADirectoryError):
        return refusal(path, "is a folder, not a file")
    if isinstance(error, NotRegularError):
        return refusal(path, f"is {error}")
    return refusal(path, f"cannot be read ({error.strerror or error}): make it readable for this process")


def refusal(path: Path, problem: str) -> CheckpointError:
    """Return the error that says what is wrong with a file of a model's folder."""
    return CheckpointError(f"{path.parent}: {path.name} {problem}")


_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
_SEEING_SUFFIX = "ForConditionalGeneration"
"""Of models that write what follows pictures and text; those of another kind have no ``vision_config``."""
CONFIG_FILE = "config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a causal language model.

    Raises:
        CheckpointError: If it is missing, unreadable, or of another kind of model.
    """
    config = find_config(folder)
    if config is None:
        raise CheckpointError(f"{folder}: not a model folder, it has no {CONFIG_FILE}{_hint(folder)}")
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    suffixes = (
        (*_CAUSAL_SUFFIXES, _SEEING_SUFFIX) if isinstance(config.get("vision_config"), dict) else _CAUSAL_SUFFIXES
    )
    if not any(isinstance(name, str) and name.endswith(suffixes) for name in names):
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: not a causal language model: architectures is {architectures!r}, not one of "
            "*ForCausalLM; give model.checkpoint one that is"
        )
    if not isinstance(config.get("model_type"), str):
        raise refusal(folder / CONFIG_FILE, "has no model_type: fetch it again, or add the one of the model")
    if "transformers_weights" in config:
        raise refusal(
            folder / CONFIG_FILE,
            "names a weight file of its own (transformers_weights), which servers do not load: call that file "
            "model.safetensors and remove the key",
        )
    return config


def classified_unit(folder: Path) -> str | None:
    """Return what the classifier of a folder scores, ``text`` or ``token``; None for another kind of model.

    Raises:
        CheckpointError: If there is no ``config.json``, or it is unreadable.
    """
    config = find_config(folder)
    if config is None:
        raise CheckpointError(f"{folder}: not a model folder, it has no {CONFIG_FILE}{_hint(folder)}")
    names = [name for name in config.get("architectures") or () if isinstance(name, str)]
    if any(name.endswith("ForSequenceClassification") for name in names):
        return "text"
    return "token" if any(name.endswith("ForTokenClassification") for name in names) else None


def label_names(folder: Path) -> tuple[str, ...]:
    """Return the labels of a classifier, as transformers names them; two where its configuration does not say."""
    config = find_config(folder) or {}
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        return tuple(str(names[key]) for key in sorted(names, key=lambda key: int(key)))
    num_labels = config.get("num_labels", 2)
    return tuple(f"LABEL_{number}" for number in range(num_labels if isinstance(num_labels, int) else 2))


def find_config(folder: Path) -> dict[str, Any] | None:
    """Return the ``config.json`` of any model; None where there is none. Raises CheckpointError if it is unreadable."""
    path = folder / CONFIG_FILE
    return read_object(path) if os.path.lexists(path) else None


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a response by ``generation_config.json`` and ``config.json``: all that they name.

    Raises:
        CheckpointError: If one of the files is unreadable.
    """
    found: list[Any] = []
    for name in ("generation_config.json", CONFIG_FILE):
        config = read_object(folder / name) if os.path.lexists(folder / name) else {}
        for section in (config, config.get("text_config")):
            value = section.get("eos_token_id") if isinstance(section, dict) else None
            found.extend(value if isinstance(value, list) else [value])
    return tuple(dict.fromkeys(value for value in found if type(value) is int and value >= 0))


def _hint(folder: Path) -> str:
    """Return where else the model may be."""
    models = sorted(folder.glob(f"*/{CONFIG_FILE}")) or sorted(folder.glob(f"snapshots/*/{CONFIG_FILE}"))
    found = [path.parent for path in models] or sorted(folder.glob("*.gguf"))
    if os.path.exists(folder / "adapter_config.json"):
        return ", but that of an adapter: merge it into its base model first"
    return f"; give model.checkpoint = {str(found[0])!r}" if found else ""
