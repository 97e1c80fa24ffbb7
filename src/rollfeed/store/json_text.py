"""JSON as it is stored: labels, metadata, settings, metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollfeed.errors import RunFailedError
from rollfeed.types.text import well_formed

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


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


def metrics_line(step: int, metrics: Mapping[str, float]) -> str:
    """Return one line of metrics.jsonl, newline included; a value that is not finite becomes null."""
    return metrics_json({"step": step, **metrics}) + "\n"


def metrics_json(metrics: Mapping[str, float]) -> str:
    """Return metrics as a JSON object; a value that is not finite becomes null."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return to_json(finite, "metrics")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one a line; none where there is no file.

    A line that is cut short is left out: a killed process was writing it, or one that lives is.

    Raises:
        OSError: If the file cannot be read.
    """
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records
