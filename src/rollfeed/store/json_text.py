"""JSON as it is stored: labels, metadata, settings, metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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


def printable_utf8(text: str) -> str:
    r"""Return text that UTF-8 can carry; a lone surrogate becomes ``\udXXX``, as JSON escapes it."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
