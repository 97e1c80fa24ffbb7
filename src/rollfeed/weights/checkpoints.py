"""Versions by the names of their folders, and whether a folder holds a whole checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from rollfeed.errors import CheckpointError
from rollfeed.model_files import CONFIG_FILE, read_headers, read_object

_VERSION = re.compile(r"(?<![0-9])(?<![0-9]\.)([0-9]{1,18})$")


def version_of(name: str) -> int | None:
    """Return the number at the end of a folder's name; None where there is none.

    ``version-000012``, ``step_12`` and ``12`` are version 12; ``llama-3.2`` is no version.
    """
    found = _VERSION.search(name)
    return None if found is None else int(found.group(1))


def check_complete(folder: Path) -> None:
    """Refuse a folder that is not a whole checkpoint in Hugging Face layout.

    Raises:
        CheckpointError: If ``config.json`` or a weight file is missing, cut short or unreadable; says which, and not
            where the folder is.
    """
    try:
        read_object(folder / CONFIG_FILE)
        read_headers(folder)
    except CheckpointError as error:
        raise CheckpointError(str(error).removeprefix(f"{folder}: ")) from None
