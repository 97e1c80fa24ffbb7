"""Versions by the names of their folders, and whether a folder holds a whole checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from rollfeed.errors import CheckpointError
from rollfeed.model_files import BESIDE_WEIGHTS, CONFIG_FILE, check_regular, read_headers, read_object
from rollfeed.types import PUBLISHED, WeightProbe

PROBE_FILE = "probe.json"
"""Beside the weights: what the publisher says of a few texts with them."""

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
        CheckpointError: If ``config.json`` or a weight file is missing, cut short or unreadable, or ``probe.json`` is
            there and no probe; says which, and not where the folder is.
    """
    try:
        check_regular(folder, BESIDE_WEIGHTS)
        read_object(folder / CONFIG_FILE)
        read_headers(folder)
        read_probe(folder)
    except CheckpointError as error:
        raise CheckpointError(str(error).removeprefix(f"{folder}: ")) from None


def read_probe(folder: Path) -> WeightProbe | None:
    """Return the probe in a folder: ``token_ids``, a list for each text, and ``logprobs``, one shorter each.

    Raises:
        CheckpointError: If it is there and cannot be used.
    """
    path = folder / PROBE_FILE
    if not path.exists():
        return None
    content = read_object(path)
    try:
        texts = [np.array(text, np.int32) for text in content["token_ids"]]
        logprobs = [np.array(text, np.float64) for text in content["logprobs"]]
        if [len(text) for text in texts] != [len(text) + 1 for text in logprobs]:
            raise ValueError("each text has one log-probability fewer than token ids")
        return WeightProbe(texts=tuple(texts), logprobs={PUBLISHED: np.concatenate(logprobs)})
    except KeyError as error:
        raise CheckpointError(f"{path}: has no {error}: write token_ids and logprobs, or leave the file out") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: is no probe: {error}; see docs/weights.md, or leave the file out") from None
