"""A clean run has no findings: integration tests lint the runs that they make anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from rollfeed.app.lint import lint, second_scores

_NUM_SCORED = 16
"""Samples whose logprobs are computed again, which takes as long as a run did; the command takes more."""


def findings_in(run: Path) -> list[dict[str, Any]]:
    """Return what is wrong with the samples of a run; it has some."""
    with patch.object(second_scores, "_MOST_SCORED", _NUM_SCORED):
        report = lint(run)
    assert report.num_samples
    return report.to_dict()["findings"]
