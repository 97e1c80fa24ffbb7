"""A clean run has no findings, and a replay makes it again: integration tests try it with the runs they make."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rollfeed.app import StepReplay, replay_run
from rollfeed.app.lint import lint, second_scores
from rollfeed.app.verifying import verify_run

_NUM_SCORED = 16
"""Samples whose logprobs are computed again, which takes as long as a run did; the command takes more."""


def findings_in(run: Path) -> list[dict[str, Any]]:
    """Return what is wrong with the samples of a run, which has some, what of it does not add up, and which steps a
    replay makes otherwise.
    """
    with patch.object(second_scores, "_MOST_SCORED", _NUM_SCORED):
        report = lint(run)
    assert report.num_samples
    differing = [{"check": "replay", "step": each} for each in asyncio.run(_replay(run)) if not each.identical]
    recounted = verify_run(run, lints=False).to_dict()["findings"]
    return [*report.to_dict()["findings"], *recounted, *differing]


async def _replay(run: Path) -> list[StepReplay]:
    return [each async for each in replay_run(run)]
