"""Paths of the public API may be text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollfeed as library
from rollfeed.app import replay_run, stored_spec
from rollfeed.store import RunReader


def test_a_run_is_made_read_scored_and_replayed_by_paths_as_text(
    rollfeed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rollfeed("init", "dataset", "sums").code == 0
    (tmp_path / "fewer.toml").write_text("[rollout]\nnum_rollout = 1\n")
    for given in ("sums/run.toml", ["sums/run.toml", "fewer.toml"]):
        spec = library.RunSpec.load(given)
    assert spec.settings.rollout.num_rollout == 1
    assert spec.folders == (tmp_path, tmp_path / "sums")
    summary = asyncio.run(library.run(library.prepare(spec, out="runs/a"), out="runs/a"))
    assert summary.directory == Path("runs/a")
    with RunReader("runs/a") as reader:
        assert [record.step for record in reader.steps()] == [0]
    assert stored_spec("runs/a").settings == spec.settings

    async def replayed() -> list[bool]:
        return [step.identical async for step in replay_run("runs/a")]

    assert asyncio.run(replayed()) == [True]
    (tmp_path / "rows.jsonl").write_text('{"response": "2", "label": "2", "metadata": {"question": "1+1"}}\n')
    functions = library.PluginSettings(reward="rewards.py:exact")
    asyncio.run(library.score_file("rows.jsonl", "scored.jsonl", functions=functions, folders=[str(tmp_path / "sums")]))
    assert json.loads((tmp_path / "scored.jsonl").read_text())["reward"] == 1.0
