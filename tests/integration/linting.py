"""A clean run has no findings, and a replay makes it again: integration tests try it with the runs they make."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rollfeed.app import StepReplay, replay_run
from rollfeed.app.lint import lint, second_scores
from rollfeed.app.verifying import verify_run
from rollfeed.store.vouching.sealed_rows import read_rows, seal_run, seal_step

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


def vouch_for_no_files(run: Path) -> None:
    """Make a run's journal one whose files nobody vouches for, as an earlier version's, so that they may be changed."""
    with closing(sqlite3.connect(run / "journal.sqlite")) as connection, connection:
        connection.execute("DELETE FROM vouched")
        for row in read_rows(connection).steps:
            seal_step(connection, row, {})
        seal_run(connection, {})


async def _replay(run: Path) -> list[StepReplay]:
    return [each async for each in replay_run(run)]
