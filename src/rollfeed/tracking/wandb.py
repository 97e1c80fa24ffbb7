"""Weights & Biases: online with a key, else in a folder that ``wandb sync`` sends."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from rollfeed.protocols import SampleRow, TrackedRun

_log = logging.getLogger(__name__)
_START_SECONDS = 20.0
_END_SECONDS = 8.0


class WandbTracker:
    """Logs against ``step``. A run that goes back goes on as another one: W&B overwrites no point of a run."""

    def start(self, run: TrackedRun) -> str:
        run.folder.mkdir(parents=True, exist_ok=True)
        wandb.setup(settings=wandb.Settings(silent=True))
        mode = os.environ.get("WANDB_MODE")
        try:
            if mode is None and not wandb.login(prompt=False):
                raise wandb.errors.UsageError("there is no key")
            self._run = _begun(run, mode)
        except wandb.errors.Error as error:
            if mode == "offline":
                raise
            why = " ".join(str(error).split())[:200]
            _log.warning("tracker wandb: %s; the run is kept in %s: send it with `wandb sync`", why, run.folder)
            self._run = _begun(run, "offline")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log({"step": step, **metrics})

    def log_samples(self, rows: Sequence[SampleRow], *, step: int, name: str) -> None:
        columns = list(rows[0])
        table = wandb.Table(columns=columns, data=[list(row.values()) for row in rows], allow_mixed_types=True)
        self._run.log({"step": step, name: table})

    def close(self) -> None:
        self._run.finish()


def _begun(run: TrackedRun, mode: Any) -> wandb.Run:
    return wandb.init(
        project=run.project,
        group=run.group,
        name=run.name,
        id=run.going_on,
        resume=None if run.going_on is None else "allow",
        reinit="create_new",
        config=dict(run.settings),
        allow_val_change=True,
        dir=run.folder.parent,  # in which W&B makes a folder of its own
        mode=mode,
        settings=wandb.Settings(
            silent=True, console="off", init_timeout=_START_SECONDS, finish_timeout=_END_SECONDS, save_code=False
        ),
    )
