"""A tracker is told all in order, or what it lacks is counted; nothing of it comes back to the run."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollfeed.protocols import SampleRow, TrackedRun
from rollfeed.tracking.tracker_thread import TrackerThread


class Told:
    """Keeps what it is told; raises where ``fails`` says so, and waits before the first metrics for ``go``."""

    def __init__(self, *, fails: str = "", go: threading.Event | None = None) -> None:
        self.calls: list[Any] = []
        self._fails, self._go = fails, go

    def start(self, run: TrackedRun) -> str:
        self.run = run
        self._call("start")
        return "its id"

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if self._go is not None:
            self._go.wait(60)
        self._call(f"log {step}")

    def log_samples(self, rows: list[SampleRow], *, step: int, name: str) -> None:
        self._call(f"{name} {step}")

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self._fails and name.startswith(self._fails):
            error = {"close": SystemExit, "log 2": BaseException}.get(self._fails, OSError)
            raise error("the disk is full")


def run_of(folder: Path, *, first_step: int = 0) -> TrackedRun:
    return TrackedRun(name="first", project="rollfeed", settings={"seed": 1}, folder=folder, first_step=first_step)


def tell(
    tracker: Any, folder: Path, *, first_step: int = 0, count: int = 3, overwrites: bool = True, seconds: float = 60
) -> TrackerThread:
    run = run_of(folder, first_step=first_step)
    thread = TrackerThread("tracker told", lambda: tracker, run, memory=folder / "told.json", overwrites=overwrites)
    for step in range(first_step, first_step + count):
        thread.tell(lambda tracker, step=step: tracker.log({}, step=step), next_step=step + 1)
    thread.end()
    thread.wait(seconds)
    thread.leave()
    return thread


def test_a_tracker_is_told_in_order_and_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Told()
    tell(tracker, tmp_path)
    assert tracker.calls == ["start", "log 0", "log 1", "log 2", "close"]
    assert json.loads((tmp_path / "told.json").read_text()) == {"run": "its id", "next_step": 3}
    assert not caplog.messages


@pytest.mark.parametrize(("fails", "lost"), [("start", 3), ("log 1", 1), ("log", 3), ("close", 0), ("log 2", 1)])
def test_what_fails_is_said_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: str, lost: int
) -> None:
    tell(Told(fails=fails), tmp_path)
    first, *counts = caplog.messages
    assert "the disk is full" in first
    assert first.endswith("; the run goes on")
    assert [each.partition(" are not")[0] for each in counts] == (
        [f"tracker told: {lost} of 3 records"] if lost else []
    )


def test_a_tracker_that_could_not_begin_begins_with_the_next_record(tmp_path: Path) -> None:
    class Down(Told):
        def start(self, run: TrackedRun) -> str:
            self._fails = "start" if self.calls.count("start") < 1 else ""
            return super().start(run)

    tracker = Down()
    tell(tracker, tmp_path)
    assert tracker.calls == ["start", "start", "log 0", "log 1", "log 2", "close"]


def test_a_tracker_that_hangs_is_left_and_the_rest_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()
    tell(Told(go=go), tmp_path, count=1500, seconds=0.1)
    go.set()
    assert caplog.messages == ["tracker told: 1500 of 1500 records are not in it (it has not answered in time)"]


def test_only_so_many_records_wait_for_a_slow_tracker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    go, tracker = threading.Event(), Told()
    tracker._go = go
    thread = TrackerThread(
        "tracker told", lambda: tracker, run_of(tmp_path), memory=tmp_path / "told.json", overwrites=True
    )
    for step in range(1500):
        thread.tell(lambda tracker, step=step: tracker.log({}, step=step))
    go.set()
    thread.end()
    thread.wait(60)
    thread.leave()
    num_logged = sum(call.startswith("log") for call in tracker.calls)
    assert num_logged in (1000, 1001)  # one may have been taken out before the others came
    assert tracker.calls[-1] == "close"
    (count,) = caplog.messages
    assert count.startswith(f"tracker told: {1500 - num_logged} of 1500 records")


def test_a_process_that_goes_on_names_the_run_that_the_tracker_has(tmp_path: Path) -> None:
    first, second = Told(), Told()
    tell(first, tmp_path)
    tell(second, tmp_path, first_step=3)
    assert first.run.going_on is None
    assert (second.run.name, second.run.going_on, second.run.went_back) == ("first", "its id", False)


@pytest.mark.parametrize(("overwrites", "name", "going_on"), [(True, "first", "its id"), (False, "first-from-1", None)])
def test_steps_that_are_made_anew_are_overwritten_or_of_another_run(
    tmp_path: Path, overwrites: bool, name: str, going_on: str | None
) -> None:
    first, second = Told(), Told()
    tell(first, tmp_path)
    tell(second, tmp_path, first_step=1, overwrites=overwrites)
    assert (second.run.name, second.run.going_on, second.run.went_back) == (name, going_on, True)


def test_a_damaged_memory_begins_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "told.json").write_text('{"run": "its')
    tracker = Told()
    tell(tracker, tmp_path)
    assert tracker.run.going_on is None
    assert tracker.calls[-1] == "close"
