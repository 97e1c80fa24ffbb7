"""Training: batches from the scheduler, updates from the trainer, new weights into the engine.

Invariant: a checkpoint after batch ``n`` is written when that batch is committed and trained on. A process that goes on
takes the newest checkpoint and takes the run back to its batch, so that rollouts and trainer never disagree.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from rollfeed.app.build import PreparedRun
from rollfeed.app.evaluation import PreparedEvaluation, evaluate, prepare_run_evaluation, tell_of_evaluation
from rollfeed.app.runs import RunSummary, early_end, run
from rollfeed.app.training.checks import check_sampling_masks, not_computed
from rollfeed.app.training.directory import (
    RecordLog,
    directory_problem,
    has_steps,
    has_warm_up,
    newest_checkpoint,
    restore,
    run_curves,
    save_step,
    save_warm_up,
    where_it_goes_on,
)
from rollfeed.app.training.exports import ModelExports
from rollfeed.app.training.no_update import EQUAL_REWARDS, warn_of_equal_rewards, why_no_update
from rollfeed.app.training.ranked_trainer import RankedTrainer
from rollfeed.app.training.remote_trainer import RemoteTrainer, RunTrainer
from rollfeed.app.training.trainers import probes_of, trainer_of
from rollfeed.app.training.warm_up import WarmUp, WarmUpProbe, prepare_warm_up
from rollfeed.base.waiting import until_done
from rollfeed.cluster import Hosting
from rollfeed.config import RolloutMode
from rollfeed.engine.launch import LaunchedEngine
from rollfeed.errors import (
    COMPUTING_ERRORS,
    CheckpointError,
    ConfigError,
    PromptsEndedError,
    RunDirectoryError,
    RunFailedError,
)
from rollfeed.evaluation import EvalResult, log_record
from rollfeed.logs import progress
from rollfeed.pipeline import Activity, Rollouts
from rollfeed.protocols import RolloutObserver
from rollfeed.report import reward_signs, warn_without_drawing, write_curves
from rollfeed.store import Rewind
from rollfeed.store.json_text import read_records
from rollfeed.store.layout import EVAL_LOG, METRICS, PRINTED, TRAIN_LOG, WARM_UP_LOG
from rollfeed.types import TensorUpdate, TrainBatch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """One batch and what it did to the policy."""

    step: int
    rollout_metrics: Mapping[str, float]
    train_metrics: Mapping[str, float]
    train_seconds: float
    no_update: str | None = None
    """Why the policy is as it was before; None where it was changed."""


OnEvaluation = Callable[[int, EvalResult], None]
"""Called with the number of batches trained on, and what was found."""


async def train(
    prepared: PreparedRun,
    *,
    out: str | Path,
    overwrite: bool = False,
    observers: Sequence[RolloutObserver] = (),
    on_step: Callable[[TrainedStep], None] | None = None,
    on_evaluation: OnEvaluation | None = None,
    on_warm_up: Callable[[WarmUpProbe], None] | None = None,
    trainer_hosting: Hosting | None = None,
) -> RunSummary:
    """Train for ``rollout.num_rollout`` batches, or for those that an earlier process left to do.

    A finished training goes on when there are more of them now. Checkpoints of the trainer and its figures are beside
    the batches in ``out``; ``on_step``, ``on_evaluation`` and ``on_warm_up`` are told of every update, evaluation and
    measurement. A trainer that is an actor is made by ``trainer_hosting``, by default as ``[cluster]`` says.

    Raises:
        RunDirectoryError: If ``out`` cannot be used; nothing has been started then.
        CheckpointError: If the model cannot be trained, or a checkpoint is of other settings.
        RollfeedError: If the run fails; the same call goes on from the last checkpoint.
    """
    out, settings = Path(out), prepared.settings
    if problem := directory_problem(prepared.spec, out, overwrite=overwrite):
        raise RunDirectoryError(problem)
    warn_without_drawing()
    newest = None if overwrite else newest_checkpoint(out)
    is_warm = not overwrite and has_warm_up(out)
    evaluation = prepare_run_evaluation(prepared.spec, prepared.model) if settings.eval.has_sets else None
    warm_up = None if is_warm else await prepare_warm_up(prepared)
    step = Rewind.START if newest is None and not overwrite and has_steps(out) else newest
    async with trainer_of(prepared, out, trainer_hosting) as trainer:
        if not overwrite:
            await asyncio.to_thread(restore, trainer, out, newest)
        loop = partial(
            _Loop,
            prepared=prepared,
            trainer=trainer,
            out=out,
            evaluation=evaluation,
            warm_up=warm_up,
            is_restored=is_warm or newest is not None,
            on_step=on_step,
            on_evaluation=on_evaluation,
            on_warm_up=on_warm_up,
        )

        async def make_batches(rollouts: Rollouts) -> str | None:
            return await loop().run(rollouts)

        return await run(
            prepared, out=out, overwrite=overwrite, step=step, observers=observers, make_steps=make_batches
        )


def _give_memory_back() -> None:
    """Leave the memory that PyTorch keeps for later to others on its GPU."""
    import torch

    torch.cuda.empty_cache()


@dataclass(kw_only=True)
class _Loop:
    """Batch, update, weights, checkpoint, evaluation; again and again."""

    prepared: PreparedRun
    trainer: RunTrainer
    out: Path
    evaluation: PreparedEvaluation | None
    warm_up: WarmUp | None
    is_restored: bool
    on_step: Callable[[TrainedStep], None] | None
    on_evaluation: OnEvaluation | None
    on_warm_up: Callable[[WarmUpProbe], None] | None
    _update: asyncio.Task[TrainedStep] | None = None
    """The newest one; its thread goes on when everybody else has been stopped."""

    def __post_init__(self) -> None:
        out, trainer, self._num_batches = self.out, self.trainer, self.prepared.num_batches
        settings, precision = self.prepared.settings, self.prepared.engine.precision
        self._probes = (
            trainer.probes(precision)
            if isinstance(trainer, RemoteTrainer)
            else probes_of(settings, trainer, checkpoint=self.prepared.model.checkpoint, precision=precision)
        )
        self._only_evaluates = settings.rollout.mode is RolloutMode.SFT and settings.needs_engine
        """Whether the engine answers nothing but evaluations, and has the weights for them."""
        self._exports = ModelExports(
            settings.train, out, checkpoint=trainer.checkpoint, chat_template=settings.model.chat_template
        )
        self._train_log = RecordLog(out / TRAIN_LOG, keep=lambda record: record["step"] < trainer.step)
        self._eval_log = RecordLog(out / EVAL_LOG, keep=lambda record: record["step"] <= trainer.step)

    async def run(self, rollouts: Rollouts) -> str | None:
        """Make all batches that are left, and the trained model; return why there are fewer than were asked for."""
        if self.warm_up is not None and not self.is_restored:
            await self._run_warm_up(self.warm_up, rollouts)
        elif self.is_restored or self._has_other_weights():
            await self._publish(rollouts)
        try:
            ended = await self._make_batches(rollouts)
        except (asyncio.CancelledError, Exception):
            # Whatever stops a training: what was trained on need not be trained on again.
            await self._save_stopped()
            raise
        await asyncio.to_thread(self._exports.export_model, self.trainer)
        return ended

    async def _make_batches(self, rollouts: Rollouts) -> str | None:
        # An evaluation that an earlier process was stopped before, or the first one.
        if not self._eval_log.records or (self._is_evaluation_due() and not self._is_evaluated()):
            await self._evaluate(rollouts)
        await self._export(only_missing=True)
        num_rollout = self.prepared.settings.rollout.num_rollout
        while rollouts.next_step < num_rollout:
            try:
                batch = await rollouts.generate_batch()
            except PromptsEndedError as error:
                ended = early_end(error, rollouts, num_rollout=num_rollout)
                if not self._is_evaluated():
                    await self._evaluate(rollouts)
                await asyncio.to_thread(save_step, self.trainer, self.out, self.trainer.step - 1)
                await self._export(only_missing=True)
                return ended
            await self._train_once(batch, rollouts)
        return None

    def _has_other_weights(self) -> bool:
        """Whether the engine names another version, as servers do that an earlier training has used."""
        return not self._only_evaluates and self.prepared.engine.policy_version != self.trainer.step

    async def _save_stopped(self) -> None:
        """Write the state after the last batch, where there is one that is whole."""
        trainer = self.trainer
        if trainer.step == 0 or trainer.is_mid_batch or (self._update is not None and not self._update.done()):
            return
        try:
            await asyncio.to_thread(save_step, trainer, self.out, trainer.step - 1)
        except CheckpointError as error:
            _log.warning("the training goes on from an earlier checkpoint: %s", error)

    def _is_evaluation_due(self) -> bool:
        interval, step = self.prepared.settings.train.eval_interval, self.trainer.step
        return step == self._num_batches or (interval is not None and step > 0 and step % interval == 0)

    def _is_evaluated(self) -> bool:
        records = self._eval_log.records
        return bool(records) and records[-1]["step"] == self.trainer.step

    async def _run_warm_up(self, warm_up: WarmUp, rollouts: Rollouts) -> None:
        """Do what comes before the first batch; the engine has the weights then."""
        log = RecordLog(self.out / WARM_UP_LOG, keep=lambda record: False)

        def tell(probe: WarmUpProbe) -> None:
            log.add({"updates": probe.num_updates, "loss": probe.loss, **probe.result.summary()})
            if self.on_warm_up is not None:
                self.on_warm_up(probe)

        await warm_up.run(
            self.trainer, engine=self.prepared.engine, publish=lambda: self._publish(rollouts), on_probe=tell
        )
        await asyncio.to_thread(self.trainer.take_as_reference)
        await asyncio.to_thread(save_warm_up, self.trainer, self.out)

    async def _train_once(self, batch: TrainBatch, rollouts: Rollouts) -> None:
        trainer = self.trainer
        if (probe := await self._probes.begin(batch)) is not None:
            await rollouts.prove_weights(probe)
        step = await self._train_on(batch)
        if not self._only_evaluates:
            await self._publish(rollouts)
        if self.on_step is not None:
            self.on_step(step)
        if self._is_evaluation_due():
            await self._evaluate(rollouts)
        # Behind these, so that what is before it is done again when it is not there.
        interval = self.prepared.settings.train.checkpoint_interval
        is_exported = self._exports.due(trainer.step, self._eval_log.records)
        if trainer.step == self._num_batches or trainer.step % interval == 0 or is_exported:
            await asyncio.to_thread(save_step, trainer, self.out, batch.step)
        await self._export(only_missing=False)

    async def _export(self, *, only_missing: bool) -> None:
        records = self._eval_log.records
        await asyncio.to_thread(self._exports.write, self.trainer, records, only_missing=only_missing)

    async def _train_on(self, batch: TrainBatch) -> TrainedStep:
        """Train on a batch in a thread; a cancellation waits for its end, so that the trainer's state is whole."""
        engine, launch = self.prepared.engine, self.prepared.settings.engine.launch
        sleeping = engine if isinstance(engine, LaunchedEngine) and launch and launch.colocate else None
        if sleeping is not None:
            await sleeping.sleep()
        self._update = asyncio.create_task(asyncio.to_thread(self._train_and_log, batch))
        trained = await until_done(self._update)
        if sleeping is not None:
            trainer = self.trainer
            give_back = trainer.give_memory_back if isinstance(trainer, RankedTrainer) else _give_memory_back
            await asyncio.to_thread(give_back)
            await sleeping.wake_up()
        return trained

    def _train_and_log(self, batch: TrainBatch) -> TrainedStep:
        settings = self.prepared.settings
        try:
            if settings.sampling.return_sampling_mask:
                check_sampling_masks(batch)
            report = self.trainer.train_step(batch)
        except RunFailedError as error:
            raise RunFailedError(f"{error}{self._where_half_a_batch_goes_on()}") from error
        except ConfigError as error:
            raise RunFailedError(f"step {batch.step}: it cannot be trained on: {error}") from error
        except COMPUTING_ERRORS as error:
            raise RunFailedError(
                f"{not_computed(error, step=batch.step)}{self._where_half_a_batch_goes_on()}"
            ) from error
        no_update = None
        if not report.num_updates:
            no_update = why_no_update(
                batch, reward_key=settings.reward.reward_key, otherwise=next(iter(report.skipped), "there was none")
            )
        progress.info(
            "step %d is trained on in %.1f s: loss %.4g%s",
            report.step,
            report.seconds,
            report.metrics.get("train/loss", math.nan),
            f", no update: {no_update}" if no_update else "",
        )
        told = {} if no_update is None else {"no_update": no_update}
        self._train_log.add({"step": report.step, **report.metrics, **told, "seconds": report.seconds})
        self.prepared.numbers.log(report.metrics, step=report.step, kind="train")
        self.prepared.trackers.log(report.metrics, step=report.step)
        if no_update == EQUAL_REWARDS:
            warn_of_equal_rewards(self._num_equal_in_a_row(), batch, settings)
        return TrainedStep(
            step=batch.step,
            rollout_metrics=batch.metrics,
            train_metrics=report.metrics,
            train_seconds=report.seconds,
            no_update=no_update,
        )

    def _where_half_a_batch_goes_on(self) -> str:
        """Return what a message ends with where a batch failed between two of its updates."""
        return f"; the training {where_it_goes_on(self.out)}" if self.trainer.is_mid_batch else ""

    def _num_equal_in_a_row(self) -> int:
        newest_first = reversed(self._train_log.records)
        return sum(1 for _ in takewhile(lambda record: record.get("no_update") == EQUAL_REWARDS, newest_first))

    async def _publish(self, rollouts: Rollouts) -> None:
        """Hand the engine the trainer's weights; version ``n`` is what training on ``n`` batches gave."""
        tensors, version = await asyncio.to_thread(self.trainer.weights), self.trainer.step
        probe = await self._probes.take()
        if probe is None:  # before the first batch there is nothing to prove them by
            with rollouts.clock.doing(Activity.PUBLISH):
                await self.prepared.engine.apply(TensorUpdate(tensors, policy_version=version))
        else:
            await rollouts.update_weights(tensors, policy_version=version, probe=probe)

    async def _evaluate(self, rollouts: Rollouts) -> None:
        """Evaluate, where there are sets to evaluate on, and draw the curves so far."""
        if self.evaluation is not None:
            if self._only_evaluates and self.prepared.engine.policy_version != self.trainer.step:
                await self._publish(rollouts)
            with rollouts.clock.doing(Activity.EVALUATE):
                result = await evaluate(self.evaluation, engine=self.prepared.engine, printed=self.out / PRINTED)
            first = next(iter(self._eval_log.records), None)
            self._eval_log.add(log_record(result, step=self.trainer.step, first=first))
            self.prepared.numbers.log(result.metrics(), step=self.trainer.step, kind="eval")
            progress.info("evaluated after %d batches: accuracy %s", self.trainer.step, result.accuracy)
            for sign in reward_signs(read_records(self.out / METRICS), self._eval_log.records):
                _log.warning("%s: %s", sign.seen.replace("{steps}", f"{len(sign.records)} steps"), sign.remedy)
            tell_of_evaluation(self.prepared.trackers, result, step=self.trainer.step)
            if self.on_evaluation is not None:
                self.on_evaluation(self.trainer.step, result)
        settings = self.prepared.settings.model_dump(mode="json")
        await asyncio.to_thread(lambda: write_curves(self.out, run_curves(self.out), settings=settings))
