"""A clean run has no findings: integration tests lint the runs that they make anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollfeed.app.lint import lint
from rollfeed.environments.registry import named_by_path


def findings_in(run: Path) -> list[dict[str, Any]]:
    """Return what is wrong with the samples of a run; it has some."""
    before = dict(named_by_path)
    try:
        report = lint(run)
    finally:  # what a run's settings name is known to this process from then on
        named_by_path.clear()
        named_by_path.update(before)
    assert report.num_samples
    return report.to_dict()["findings"]
