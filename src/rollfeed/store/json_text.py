"""JSON as it is stored: labels, metadata, settings, metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollfeed.errors import RunFailedError

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def to_json(value: Any, what: str) -> str:
    """Return JSON text that is valid UTF-8, keys in their order.

    Raises:
        RunFailedError: If the value is not JSON; the message says ``what`` it is.
    """
    try:
        text = _ENCODER.encode(value)
    except (TypeError, ValueError) as error:
        raise RunFailedError(
            f"{what} cannot be stored: {error}; use JSON values (text, numbers, lists, dicts)"
        ) from None
    return printable_utf8(text)


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


def printable_utf8(text: str) -> str:
    r"""Return text that UTF-8 can carry; a lone surrogate becomes ``\udXXX``, as JSON escapes it."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
