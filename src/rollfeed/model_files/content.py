"""Whether a file is what its name says, from its first bytes.

Every message begins with the folder, a colon and a space, so that who has said the folder already can leave it out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def check_content(path: Path) -> None:
    """Refuse what stands in a file's place without being it: a pointer, a web page, a folder, a broken link.

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
        with path.open("rb") as file:
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
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"is not JSON, or cut short ({error}): fetch it again") from None
    if not isinstance(found, dict):
        raise refusal(path, "is not a JSON object")
    return found


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return what to say of a file that cannot be opened."""
    if isinstance(error, FileNotFoundError):
        if path.is_symlink():
            return refusal(path, "is a link to a file that is not there: fetch the model again")
        return refusal(path, "is missing")
    if isinstance(error, IsADirectoryError):
        return refusal(path, "is a folder, not a file")
    return refusal(path, f"cannot be read ({error.strerror or error}): make it readable for this process")


def refusal(path: Path, problem: str) -> CheckpointError:
    """Return the error that says what is wrong with a file of a model's folder."""
    return CheckpointError(f"{path.parent}: {path.name} {problem}")
