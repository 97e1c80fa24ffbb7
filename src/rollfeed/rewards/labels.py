"""Labels as graders take them."""

from __future__ import annotations

from typing import Any

from rollfeed.types import Outcome, Verdict


def accepted_labels(label: Any) -> list[str] | None:
    """Return the texts any of which is right, or None for a label that is no text, number or list of these."""
    labels = label if isinstance(label, list | tuple) else [label]
    if not labels or not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in labels):
        return None
    texts = [str(one) for one in labels]
    return texts if all(text.strip() for text in texts) else None


def undecidable(rm_type: str, label: Any, wanted: str) -> Verdict:
    """Return the ERROR verdict for a label that the grader cannot compare with."""
    return Verdict(
        reward=None, outcome=Outcome.ERROR, detail=f"rm_type {rm_type}: the label is {label!r:.80}; it must be {wanted}"
    )
