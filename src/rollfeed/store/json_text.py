"""JSON as it is stored: labels, metadata, settings, metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollfeed.base.atomic import read_regular
from rollfeed.errors import RunFailedError
from rollfeed.types import Prompt, Rollout, RunState, Sample
from rollfeed.types.text import well_formed

_TITLES = {
    Prompt: "prompt {0.prompt_id}",
    Rollout: "rollout {0.rollout_id}",
    Sample: "sample {0.index}",
    RunState: "the run's state",
}


def _as_dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_as_dict)


def to_json(value: Any, what: str) -> str:
    """Return JSON text, keys in their order; a lone surrogate becomes U+FFFD.

    Raises:
        RunFailedError: If the value is not JSON; the message says ``what`` it is.
    """
    try:
        text = _ENCODER.encode(value)
    except (TypeError, ValueError) as error:
        raise RunFailedError(
            f"{what} cannot be stored: {error}; use JSON values (text, numbers, lists, dicts)"
        ) from None
    return well_formed(text)


def of_record(record: Any, error: RunFailedError) -> RunFailedError:
    """Return the error of a field that is not JSON with the name of the record that has it."""
    title = _TITLES.get(type(record))
    return error if title is None else RunFailedError(f"{title.format(record)}: {error}")


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics with None in place of values that are not finite, for which JSON has no form."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one a line; none where there is no file.

    A line that is cut short is left out: a killed process was writing it, or one that lives is.

    Raises:
        OSError: If the file cannot be read.
    """
    if not path.exists():
        return []
    records = []
    # Bytes: a line may be cut short within a character, and texts in it may hold what Unicode counts as line breaks.
    for line in read_regular(path).split(b"\n"):
        with suppress(ValueError):
            records.append(json.loads(line))
    return records
