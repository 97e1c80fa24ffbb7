"""Trackio: a database of this machine, which ``trackio show`` reads, or the server that its variables name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trackio

from rollfeed.protocols import SampleRow, TrackedRun


class TrackioTracker:
    """Logs by step. A run that goes back goes on as another one, as Trackio overwrites nothing."""

    def start(self, run: TrackedRun) -> str:
        self._run = self._begun(run, resume="never" if run.going_on is None else "allow")
        if run.going_on not in (None, self._run.id):  # a later run has the same name
            self._run = self._begun(run, resume="never")
        return str(self._run.id)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[SampleRow], *, step: int, name: str) -> None:
        table = trackio.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        self._run.finish()

    @staticmethod
    def _begun(run: TrackedRun, *, resume: str) -> trackio.Run:
        return trackio.init(
            project=run.project,
            name=run.name,
            group=run.group,
            config=dict(run.settings),
            resume=resume,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
