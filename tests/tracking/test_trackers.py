"""Trackers by name, what they are told of settings, and the samples that they are shown."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rollfeed.config import TrackerName, TrackingSettings
from rollfeed.errors import ConfigError
from rollfeed.testing import make_group
from rollfeed.tracking import Trackers
from rollfeed.tracking.sample_table import sample_rows


@pytest.mark.parametrize("name", list(TrackerName))
def test_a_tracker_that_is_not_installed_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch, name: TrackerName
) -> None:
    monkeypatch.setitem(sys.modules, name.value, None)
    with pytest.raises(ConfigError, match=rf"{name.value} is not installed: pip install 'rollfeed\[{name.value}\]'"):
        Trackers(TrackingSettings(trackers=(name,)), reward_key=None)


def test_the_folder_that_a_tracker_leaves_is_not_taken_for_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match="wandb is not installed"):
        Trackers(TrackingSettings(trackers=(TrackerName.WANDB,)), reward_key=None)


class Own:
    """A tracker that keeps what it is told of the run."""

    def start(self, run: Any) -> str:
        self.run = run
        return ""

    def log(self, metrics: Any, *, step: int) -> None:
        print("told of", step)

    def log_samples(self, rows: Any, *, step: int, name: str) -> None: ...

    def close(self) -> None: ...


async def test_values_for_other_programs_are_not_told_and_prints_go_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Own()
    trackers = Trackers(TrackingSettings(), reward_key=None, own=own)
    tree = {
        "seed": 1,
        "tools": {"mcp": [{"name": "search", "env": {"KEY": "secret"}}]},
        "plugins": {"slime_args": {"wandb_key": "secret"}},
    }
    async with trackers.following(tmp_path, tree=tree, first_step=0, folder=tmp_path, prints=tmp_path / "printed.log"):
        trackers.log({"train/loss": 1.0}, step=4)
    assert own.run.settings == {"seed": 1, "tools.mcp": [{"name": "search"}]}
    assert (own.run.name, own.run.project) == (tmp_path.name, "rollfeed")
    assert (tmp_path / "printed.log").read_text() == "told of 4\n"
    assert capsys.readouterr().out == ""


def test_a_tracker_that_nothing_would_await_is_refused() -> None:
    class Awaited(Own):
        async def log(self, metrics: Any, *, step: int) -> None:  # type: ignore[override]
            raise AssertionError

    with pytest.raises(ConfigError, match=r"plugins\.tracker: log of .*Awaited is async, .* use def"):
        Trackers(TrackingSettings(), reward_key=None, own=Awaited())


class Slow(Own):
    """A tracker that takes metrics when it may."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def log(self, metrics: Any, *, step: int) -> None:
        self.go.wait(60)


async def test_everything_else_goes_on_while_a_slow_tracker_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Slow()
    trackers = Trackers(TrackingSettings(), reward_key=None, own=own)
    async with trackers.following(tmp_path, tree={}, first_step=0, folder=tmp_path, prints=tmp_path / "printed.log"):
        trackers.log({"train/loss": 1.0}, step=0)
        asyncio.get_running_loop().call_soon(own.go.set)  # runs when the end of the block leaves the loop to others
    assert caplog.messages == []


async def test_a_cancellation_ends_the_waiting_for_trackers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = Slow()
    trackers = Trackers(TrackingSettings(), reward_key=None, own=own)

    async def follow() -> None:
        following = trackers.following(
            tmp_path, tree={}, first_step=0, folder=tmp_path, prints=tmp_path / "printed.log"
        )
        async with following:
            trackers.log({"train/loss": 1.0}, step=0)
            asyncio.get_running_loop().call_soon(task.cancel)

    task = asyncio.create_task(follow())
    await asyncio.wait([task])
    assert task.cancelled()
    (message,) = caplog.messages
    assert "1 of 1 records are not in it" in message
    own.go.set()


def test_samples_are_spread_over_the_groups_and_long_texts_are_cut() -> None:
    groups = [make_group([float(number), 0.5], group_index=number) for number in range(10)]
    rows = sample_rows(groups, count=3, reward_key=None)
    assert [row["group_index"] for row in rows] == [0, 5, 9]
    assert [row["reward"] for row in rows] == [0.0, 5.0, 0.5]
    assert rows[0]["label"] == "4"
    assert sample_rows(groups, count=0, reward_key=None) == []
    assert len(sample_rows(groups, count=50, reward_key=None)) == 20
    assert sample_rows([make_group([{"a": 1.0}])], count=1, reward_key="b")[0]["reward"] is None


def test_long_texts_lose_their_middle() -> None:
    from rollfeed.testing import make_prompt

    group = make_group([1.0], prompt=make_prompt("a" * 12_000 + "b" * 12_000))
    prompt = str(sample_rows([group], count=1, reward_key=None)[0]["prompt"])
    assert prompt == "a" * 5000 + " [... 14000 characters ...] " + "b" * 5000
