"""A clean run has no findings: integration tests lint the runs that they make anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollfeed.app.lint import lint


def findings_in(run: Path) -> list[dict[str, Any]]:
    """Return what is wrong with the samples of a run; it has some."""
    report = lint(run)
    assert report.num_samples
    return report.to_dict()["findings"]
