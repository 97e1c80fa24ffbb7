"""Models that a training leaves on its way: at intervals, and that of the best evaluation.

Invariants: what is exported was checkpointed before, so that a training which goes on is never behind it; an older
export is removed when the newer one stands; what a kill left undone is done by the next process.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollfeed.app.training.directory import export_model
from rollfeed.config.train import TrainSettings
from rollfeed.evaluation import scores_of_record
from rollfeed.store.layout import BEST, EXPORTS, export_folders, exported_step

if TYPE_CHECKING:
    from rollfeed.app.training.remote_trainer import RunTrainer


class ModelExports:
    """Decides which exports there are, and writes and removes them.

    Args:
        settings: Of the training.
        out: The run directory.
        checkpoint: As :func:`export_model` takes it.
        chat_template: As :func:`export_model` takes it.
    """

    def __init__(self, settings: TrainSettings, out: Path, *, checkpoint: Path, chat_template: str | None) -> None:
        self._settings, self._out = settings, out
        self.export_model = partial(export_model, out=out, checkpoint=checkpoint, chat_template=chat_template)
        for left in (out / EXPORTS).glob(".*.tmp"):
            shutil.rmtree(left, ignore_errors=True)

    def due(self, step: int, evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the names that the model after ``step`` batches is exported under."""
        interval, metric, names = self._settings.export_interval, self._settings.export_best, []
        if interval and step and step % interval == 0:
            names.append(f"step-{step:06d}")
        scored = [
            (scores[metric], record["step"])
            for record in evaluations
            if metric is not None and metric in (scores := scores_of_record(record))
        ]
        # Of equal ones the first: a later model has to be better.
        if scored and max(scored, key=lambda each: each[0])[1] == step:
            names.append(BEST)
        return names

    def write(self, trainer: RunTrainer, evaluations: Sequence[Mapping[str, Any]], *, only_missing: bool) -> None:
        """Write what is due, and remove what is too much of those before; blocks for the disk.

        Raises:
            RunFailedError: If the disk does not take it.
        """
        step, metric = trainer.step, self._settings.export_best or "accuracy"
        scores = next((scores_of_record(each) for each in reversed(evaluations) if each["step"] == step), {})
        about = {"step": step, **({metric: scores[metric]} if metric in scores else {})}
        for name in self.due(step, evaluations):
            folder = self._out / EXPORTS / name
            if not (only_missing and folder.is_dir() and exported_step(folder) == step):
                self.export_model(trainer, name=f"{EXPORTS}/{name}", about=about)
        if self._settings.num_exports_kept is not None:
            # One of a later step is of batches that are made anew, and counts when it is, too.
            made = [each for each in export_folders(self._out) if each.name != BEST and exported_step(each) <= step]
            for folder in made[: -self._settings.num_exports_kept]:
                shutil.rmtree(folder)
