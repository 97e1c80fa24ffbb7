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
from typing import TYPE_CHECKING, Any

from rollfeed.app.evaluation import PreparedEvaluation, evaluate, prepare_evaluation
from rollfeed.app.runs import PreparedRun, RunSummary, open_run
from rollfeed.config.train import AdvantageEstimator
from rollfeed.errors import RollfeedError, RunDirectoryError
from rollfeed.evaluation import EvalResult
from rollfeed.pipeline import Rollouts
from rollfeed.protocols import RolloutObserver
from rollfeed.store import RunDirectory, RunReader
from rollfeed.store.atomic import replace_file
from rollfeed.store.layout import CHECKPOINTS, EVAL_LOG, TRAIN_LOG
from rollfeed.training import batch_advantages
from rollfeed.types import TrainBatch

if TYPE_CHECKING:
    from rollfeed.training.trainer import Trainer

_NUM_KEPT = 2
_CHECKPOINT_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """One batch and what it did to the policy."""

    step: int
    rollout_metrics: Mapping[str, float]
    train_metrics: Mapping[str, float]
    train_seconds: float


OnEvaluation = Callable[[int, EvalResult], None]
"""Called with the number of batches trained on, and what was found."""


async def train(
    prepared: PreparedRun,
    *,
    out: Path,
    overwrite: bool = False,
    observers: Sequence[RolloutObserver] = (),
    on_step: Callable[[TrainedStep], None] | None = None,
    on_evaluation: OnEvaluation | None = None,
) -> RunSummary:
    """Train for ``rollout.num_rollout`` batches, or for those that an earlier process left to do.

    Args:
        prepared: Settings and parts, checked.
        out: The run directory; checkpoints of the trainer and its figures are beside the batches.
        overwrite: Replace the run that is there.
        observers: Told of rollouts as they come.
        on_step: Told after every batch that was trained on.
        on_evaluation: Told after every evaluation on the sets of ``[eval]``, if there are any.

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
    evaluation = _prepare_evaluation(prepared)
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
            loop = _Loop(prepared, trainer, evaluation, directory.path, on_step, on_evaluation)
            return await loop.run(directory, observers)
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


def _prepare_evaluation(prepared: PreparedRun) -> PreparedEvaluation | None:
    if not prepared.settings.eval.has_sets:
        return None
    return prepare_evaluation(
        prepared.settings.eval,
        config=prepared.config,
        tokenizer=prepared.model.tokenizer,
        context_length=prepared.engine.context_length,
        folders=prepared.folders,
    )


class _Loop:
    """Batch, update, weights, checkpoint, evaluation; again and again."""

    def __init__(
        self,
        prepared: PreparedRun,
        trainer: Trainer,
        evaluation: PreparedEvaluation | None,
        out: Path,
        on_step: Callable[[TrainedStep], None] | None,
        on_evaluation: OnEvaluation | None,
    ) -> None:
        self._prepared = prepared
        self._trainer = trainer
        self._evaluation = evaluation
        self._out = out
        self._on_step = on_step
        self._on_evaluation = on_evaluation
        self._num_batches = prepared.settings.rollout.num_rollout
        self._train_log = _Log(out / TRAIN_LOG, keep=lambda record: record["step"] < trainer.step)
        self._eval_log = _Log(out / EVAL_LOG, keep=lambda record: record["step"] <= trainer.step)

    async def run(self, directory: RunDirectory, observers: Sequence[RolloutObserver]) -> RunSummary:
        rollouts, close = open_run(directory, self._prepared, observers)
        resumed = rollouts.next_step
        try:
            async with rollouts:
                if self._trainer.step:
                    await self._publish(rollouts)
                elif not self._eval_log.has_records:
                    await self._evaluate()
                while rollouts.next_step < self._num_batches:
                    await self._train_once(rollouts)
            directory.finish()
        finally:
            close()
        return RunSummary(
            directory=directory.path,
            num_steps=rollouts.next_step,
            num_resumed_steps=resumed,
            ledger=rollouts.ledger,
        )

    async def _train_once(self, rollouts: Rollouts) -> None:
        trainer, train = self._trainer, self._prepared.settings.train
        batch = _with_advantages(await rollouts.generate_batch(), self._prepared)
        report = await asyncio.to_thread(trainer.train_step, batch)
        await self._publish(rollouts)
        self._train_log.add({"step": report.step, **report.metrics, "seconds": report.seconds})
        if self._on_step is not None:
            self._on_step(
                TrainedStep(
                    step=batch.step,
                    rollout_metrics=batch.metrics,
                    train_metrics=report.metrics,
                    train_seconds=report.seconds,
                )
            )
        is_last = trainer.step == self._num_batches
        if is_last or (train.eval_interval is not None and trainer.step % train.eval_interval == 0):
            await self._evaluate()
        # Last, so that what is before it is done again when it is not there.
        if is_last or trainer.step % train.checkpoint_interval == 0:
            await asyncio.to_thread(_save, trainer, self._out, batch.step)

    async def _publish(self, rollouts: Rollouts) -> None:
        """Hand the engine the trainer's weights; version ``n`` is what training on ``n`` batches gave."""
        await rollouts.update_weights(self._trainer.weights(), policy_version=self._trainer.step)

    async def _evaluate(self) -> None:
        if self._evaluation is None:
            return
        result = await evaluate(self._evaluation, engine=self._prepared.engine)
        self._eval_log.add({"step": self._trainer.step, **result.summary()})
        if self._on_evaluation is not None:
            self._on_evaluation(self._trainer.step, result)


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


class _Log:
    """One line of JSON a record; those that a process which goes on will make again are taken out."""

    def __init__(self, path: Path, *, keep: Callable[[dict[str, Any]], bool]) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if (record := _whole(line)) is not None and keep(record)]
        replace_file(path, lambda file: file.write("".join(f"{line}\n" for line in kept).encode()))
        self.has_records = bool(kept)

    def add(self, record: Mapping[str, Any]) -> None:
        self.has_records = True
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _whole(line: str) -> dict[str, Any] | None:
    """Return a record, or None for a line that a kill has cut short."""
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return record
