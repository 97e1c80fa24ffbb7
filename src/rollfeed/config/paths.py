"""Paths and addresses as people write them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit


def as_paths(folders: Sequence[str | Path]) -> tuple[Path, ...]:
    """Return folders that a caller names as text or as paths."""
    return tuple(map(Path, folders))


def expand_path(path: str) -> str:
    """Return a path with ``~`` and environment variables replaced; what is not set stays as it is."""
    return os.path.expandvars(os.path.expanduser(path))


def checked_address(text: str, *, has_path: bool = False) -> str:
    """Return the address of a server without a slash at its end.

    ``has_path`` says whether there may be a path behind host and port.

    Raises:
        ValueError: If it is none, or has more in it.
    """
    form = "write it as http://host:port"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{text!r} is not an address ({error}): {form}") from None
    if parts.username is not None:
        raise ValueError("it has a user name in it: name the variable that holds the key as api_key_env instead")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or any(map(str.isspace, text)):
        raise ValueError(f"{text!r} is not an address: {form}")
    if parts.query or parts.fragment or (parts.path.strip("/") and not has_path):
        raise ValueError(f"{text!r} has more than {'an address in it' if has_path else 'host and port'}: {form}")
    return text.rstrip("/")
