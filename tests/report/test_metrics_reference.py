from __future__ import annotations

import re
from pathlib import Path

from docs.pages.metrics import described_metrics, page


def test_the_page_is_current() -> None:
    written = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert written.read_text(encoding="utf-8") == page()


def test_every_metric_is_described_once_in_a_module() -> None:
    names = [(name, each.module) for each in described_metrics() for name in each.names]
    assert len(set(names)) == len(names) > 80


def test_the_five_to_watch_are_metrics() -> None:
    watched = re.findall(r"^\| `([a-z_/]+)` \|", page().partition("## rollout")[0], re.MULTILINE)
    assert len(watched) == 5
    assert set(watched) <= {name for each in described_metrics() for name in each.names}
