"""The processes of ``rollfeed bench chaos``: the run that it breaks, and fake SGLang servers, which come back."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from rollfeed.benchmarks.machine import CommandProcess, free_port, is_listening
from rollfeed.errors import EngineUnavailableError, RunFailedError
from rollfeed.workers import child

_START_SECONDS = 60.0
_RETRY_SECONDS = 0.2
_TIME_MODEL = ("--num-slots", "32", "--step-ms", "1.5", "--median-length", "40", "--max-length", "120")
_FOLDERS = ("batches", "dropped", "timings", "states")
_POLL_SECONDS = 0.01
_QUIET_SECONDS = 300.0
"""A run that makes no step for so long is stuck, its start included."""


class ChaosEngine(CommandProcess):
    """One server. Entering starts it, and does not wait for it.

    Args:
        time_model: Flags of ``rollfeed serve fake-sglang`` that say how long it takes.
    """

    def __init__(self, time_model: Sequence[str] = _TIME_MODEL) -> None:
        self._port = free_port()
        super().__init__(["serve", "fake-sglang", "--mode", "time-model", "--port", self._port, *time_model])

    @property
    def address(self) -> str:
        """The address that it listens at, whenever it does."""
        return f"http://127.0.0.1:{self._port}"

    def wait_until_ready(self) -> None:
        """Return when the server listens; it is started again when it could not.

        Raises:
            EngineUnavailableError: If it does not within a minute.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not is_listening(self._port):
            if time.monotonic() > deadline:
                raise EngineUnavailableError(f"the fake engine at {self.address} is not there: {_START_SECONDS:g} s")
            if self.has_ended:
                self.start()
            time.sleep(_RETRY_SECONDS)


class RunProcess(CommandProcess):
    """``rollfeed run`` in a process of its own, in a directory that it shares with those before and after it."""

    def __init__(self, settings: Path, out: Path, *, overrides: Sequence[str] = ()) -> None:
        words = [word for each in overrides for word in ("--set", each)]
        super().__init__(["run", settings, "--out", out, "--quiet", *words], log=out.with_name(f"{out.name}.log"))
        self.out = out

    def is_mid_commit(self) -> bool:
        """Whether the process was killed inside a commit: files of a step are there whose row is not in the journal."""
        committed = committed_steps(self.out)
        return any(step not in committed for step in _steps_with_files(self.out))

    def wait_until(self, condition: Callable[[], bool], *, poll_seconds: float = _POLL_SECONDS) -> bool:
        """Wait for a condition that the run brings about; return whether it came, else the process has ended.

        Raises:
            RunFailedError: If the process neither does it nor ends.
        """
        num_steps, deadline = self.num_steps(), time.monotonic() + _QUIET_SECONDS
        while not condition():
            if self.has_ended:
                return condition()
            if time.monotonic() > deadline:
                if self.num_steps() == num_steps:
                    raise RunFailedError(f"{self.out}: no step in {_QUIET_SECONDS:g} s: {self.last_words()}")
                num_steps, deadline = self.num_steps(), time.monotonic() + _QUIET_SECONDS
            time.sleep(poll_seconds)
        return True

    def wait_for_end(self) -> int:
        """Wait for the process's own end and return its exit code.

        Raises:
            RunFailedError: If it makes no step for long.
        """
        while not self.has_ended:
            self.wait_until(partial(self._has_more_than, self.num_steps()))
        return self.process.wait()

    def num_steps(self) -> int:
        """Return how many steps have their batch file."""
        try:
            return sum(1 for _ in (self.out / "batches").glob("step-*.parquet"))
        except FileNotFoundError:
            return 0

    def _has_more_than(self, num_steps: int) -> bool:
        return self.num_steps() > num_steps

    def batch_file(self, step: int) -> Path:
        return self.out / "batches" / f"step-{step:06d}.parquet"

    def is_committing(self, step: int, *, instant: float) -> bool:
        """Tell whether the commit of a step has come far, from 0 to 1, or is over."""
        name = f"step-{step:06d}"
        appearing = [
            self.out / "batches" / f".{name}.parquet.tmp",
            self.batch_file(step),
            self.out / "timings" / f"{name}.parquet",
            self.out / "states" / f"{name}.state",
            self.batch_file(step + 1),
        ]
        return any(path.exists() for path in appearing[int(instant * (len(appearing) - 1)) :])

    def worker_pids(self) -> list[int]:
        """Return the reward workers: children that run the program of workers."""
        found: list[int] = []
        with suppress(OSError):
            for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
                found += [int(text) for text in path.read_text().split()]
        return sorted(pid for pid in found if _is_worker(pid))


def committed_steps(out: Path) -> frozenset[int]:
    """Return the steps in the journal of a run on which no process works.

    A copy is asked: sqlite would repair the journal of a killed process, which is for the next process to do.
    """
    if not (out / "journal.sqlite").exists():
        return frozenset()
    with tempfile.TemporaryDirectory(prefix="rollfeed-chaos-") as folder:
        for path in out.glob("journal.sqlite*"):
            if not path.name.endswith("-shm"):
                shutil.copy(path, folder)
        with closing(sqlite3.connect(Path(folder) / "journal.sqlite")) as connection:
            return frozenset(step for (step,) in connection.execute("SELECT step FROM steps"))


def final_ledger(out: Path) -> dict[str, float]:
    """Return what the run itself counted by place, as of its last step."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    metrics = json.loads(lines[-1]) if lines else {}
    return {name.removeprefix("ledger/"): value for name, value in metrics.items() if name.startswith("ledger/")}


def _steps_with_files(out: Path) -> set[int]:
    paths = [path for folder in _FOLDERS for path in (out / folder).glob("*step-*")]
    return {int(path.name.partition("step-")[2].partition(".")[0]) for path in paths}


def _is_worker(pid: int) -> bool:
    try:
        return str(child.__file__) in Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
