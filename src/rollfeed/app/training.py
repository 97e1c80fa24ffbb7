"""Training: batches from the scheduler, updates from the trainer, new weights into the engine.

Invariant: a checkpoint after batch ``n`` is written when that batch is committed and trained on. A process that goes on
takes the newest checkpoint and takes the run back to its batch, so that rollouts and trainer never disagree.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollfeed.app.runs import PreparedRun, RunSummary, open_run
from rollfeed.config.train import AdvantageEstimator
from rollfeed.errors import RollfeedError, RunDirectoryError
from rollfeed.pipeline import Rollouts
from rollfeed.protocols import RolloutObserver
from rollfeed.store import RunDirectory, RunReader
from rollfeed.training import batch_advantages
from rollfeed.types import TrainBatch

if TYPE_CHECKING:
    from rollfeed.training.trainer import Trainer, TrainReport

CHECKPOINTS, TRAIN_LOG = "checkpoints", "train.jsonl"
_NUM_KEPT = 2
_CHECKPOINT_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """One batch and what it did to the policy."""

    step: int
    rollout_metrics: Mapping[str, float]
    train_metrics: Mapping[str, float]
    train_seconds: float


async def train(
    prepared: PreparedRun,
    *,
    out: Path,
    overwrite: bool = False,
    observers: Sequence[RolloutObserver] = (),
    on_step: Callable[[TrainedStep], None] | None = None,
) -> RunSummary:
    """Train for ``rollout.num_rollout`` batches, or for those that an earlier process left to do.

    Args:
        prepared: Settings and parts, checked.
        out: The run directory; checkpoints of the trainer and its figures are beside the batches.
        overwrite: Replace the run that is there.
        observers: Told of rollouts as they come.
        on_step: Told after every update.

    Raises:
        RunDirectoryError: If ``out`` cannot be used; nothing has been started then.
        CheckpointError: If the model cannot be trained, or a checkpoint is of other settings.
        RollfeedError: If the run fails; the same call goes on from the last checkpoint.
    """
    settings = prepared.settings
    if problem := RunDirectory.problem(out, identity=settings.identity(), overwrite=overwrite):
        raise RunDirectoryError(problem)
    newest = None if overwrite else newest_checkpoint(out)
    begins_anew = overwrite or (newest is None and _has_steps(out))
    trainer = await asyncio.to_thread(_make_trainer, prepared)
    if newest is not None:
        await asyncio.to_thread(trainer.load, _checkpoint(out, newest))
    directory = RunDirectory.open(
        out,
        settings=settings.model_dump(mode="json"),
        identity=settings.identity(),
        overwrite=begins_anew,
        step=newest,
        folders=prepared.folders,
    )
    with directory:
        if newest is None:
            shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
        try:
            return await _train_in(directory, prepared, trainer, observers, on_step)
        except RollfeedError as error:
            directory.fail(str(error))
            raise


def newest_checkpoint(out: Path) -> int | None:
    """Return the batch after which the newest whole checkpoint of a run directory was written; None without one."""
    if not (out / CHECKPOINTS).is_dir():
        return None
    found = [match for path in (out / CHECKPOINTS).iterdir() if (match := _CHECKPOINT_NAME.fullmatch(path.name))]
    return max((int(match[1]) for match in found), default=None)


def _has_steps(out: Path) -> bool:
    """Whether an unfinished run is there: one that has no checkpoint has nothing that is worth keeping."""
    if not out.exists() or not any(out.iterdir()):
        return False
    with RunReader(out) as reader:
        return bool(reader.steps())


def _make_trainer(prepared: PreparedRun) -> Trainer:
    # PyTorch takes seconds to import.
    from rollfeed.training.trainer import Trainer

    settings = prepared.settings
    return Trainer(
        prepared.model.checkpoint,
        settings=settings.train,
        temperature=settings.sampling.rollout_temperature,
        num_batches=settings.rollout.num_rollout,
        max_response_length=settings.sampling.rollout_max_response_len,
        trust_remote_code=settings.model.trust_remote_code,
    )


async def _train_in(
    directory: RunDirectory,
    prepared: PreparedRun,
    trainer: Trainer,
    observers: Sequence[RolloutObserver],
    on_step: Callable[[TrainedStep], None] | None,
) -> RunSummary:
    settings = prepared.settings
    log = _TrainLog(directory.path / TRAIN_LOG, num_steps=trainer.step)
    rollouts, close = open_run(directory, prepared, observers)
    resumed = rollouts.next_step
    try:
        async with rollouts:
            if trainer.step:
                await _publish(trainer, rollouts)
            while rollouts.next_step < settings.rollout.num_rollout:
                batch = _with_advantages(await rollouts.generate_batch(), prepared)
                report = await asyncio.to_thread(trainer.train_step, batch)
                await _publish(trainer, rollouts)
                is_last = rollouts.next_step == settings.rollout.num_rollout
                if is_last or trainer.step % settings.train.checkpoint_interval == 0:
                    await asyncio.to_thread(_save, trainer, directory.path, batch.step)
                log.add(report)
                if on_step is not None:
                    on_step(
                        TrainedStep(
                            step=batch.step,
                            rollout_metrics=batch.metrics,
                            train_metrics=report.metrics,
                            train_seconds=report.seconds,
                        )
                    )
        directory.finish()
    finally:
        close()
    return RunSummary(
        directory=directory.path,
        num_steps=rollouts.next_step,
        num_resumed_steps=resumed,
        ledger=rollouts.ledger,
    )


async def _publish(trainer: Trainer, rollouts: Rollouts) -> None:
    """Hand the engine the trainer's weights; version ``n`` is what training on ``n`` batches gave."""
    await rollouts.update_weights(trainer.weights(), policy_version=trainer.step)


def _with_advantages(batch: TrainBatch, prepared: PreparedRun) -> TrainBatch:
    estimator = prepared.settings.train.advantage
    if estimator is AdvantageEstimator.GROUP_MEAN:
        return batch
    advantages_S = batch_advantages(batch.groups, estimator=estimator, reward_key=prepared.settings.reward.reward_key)
    return replace(batch, advantages_S=advantages_S)


def _checkpoint(out: Path, step: int) -> Path:
    return out / CHECKPOINTS / f"step-{step:06d}"


def _save(trainer: Trainer, out: Path, step: int) -> None:
    (out / CHECKPOINTS).mkdir(exist_ok=True)
    if not _checkpoint(out, step).exists():
        trainer.save(_checkpoint(out, step))
    kept = sorted(path for path in (out / CHECKPOINTS).iterdir() if _CHECKPOINT_NAME.fullmatch(path.name))
    for path in kept[:-_NUM_KEPT]:
        shutil.rmtree(path)


class _TrainLog:
    """One line of JSON a batch that was trained on; those of batches that are trained on again are replaced."""

    def __init__(self, path: Path, *, num_steps: int) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        path.write_text("".join(f"{line}\n" for line in lines[:num_steps]), encoding="utf-8")

    def add(self, report: TrainReport) -> None:
        record = {"step": report.step, **report.metrics, "seconds": report.seconds}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
