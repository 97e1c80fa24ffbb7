"""A whole run, made step by step; and what can be said of its directory before."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rollfeed import __version__
from rollfeed.app.build import PreparedRun, open_rollouts
from rollfeed.app.model import keep_server_logs
from rollfeed.config import RunSpec, Settings
from rollfeed.errors import (
    COMPUTING_ERRORS,
    PromptsEndedError,
    RollfeedError,
    RunDirectoryError,
    RunFailedError,
    in_one_line,
)
from rollfeed.faults import once_started
from rollfeed.logs import progress, run_log
from rollfeed.pipeline import Rollouts
from rollfeed.protocols import RolloutObserver
from rollfeed.report import serving_numbers
from rollfeed.store import Rewind, RunDirectory
from rollfeed.store.layout import PICTURES, PRINTED, TRACKERS, holds_training
from rollfeed.tracking import Trackers
from rollfeed.types import LedgerCounts, StepCommit

MakeSteps = Callable[[Rollouts], Awaitable[str | None]]
"""Makes the steps of a run; returns why it made fewer than it was asked for, if it did."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The counts of a finished run."""

    directory: Path
    num_steps: int
    num_resumed_steps: int
    """Of these, how many an earlier process had done."""
    ledger: LedgerCounts
    early_end: str | None = None
    """Why there are fewer steps than were asked for."""


async def run(
    prepared: PreparedRun,
    *,
    out: str | Path,
    overwrite: bool = False,
    step: int | Rewind | None = None,
    observers: Sequence[RolloutObserver] = (),
    make_steps: MakeSteps | None = None,
) -> RunSummary:
    """Make all steps of a run in ``out``, or those that an earlier process left to do, and store how it ended.

    With ``step`` the run goes back to its state after that committed step first. ``make_steps`` has the manager, which
    goes on from there, make its batches; by default it makes all.

    Raises:
        RunDirectoryError: If ``out`` cannot be used; nothing has been started then.
        RollfeedError: If the run fails; the cause is stored, finished steps stay readable, the same call resumes it.
    """
    out, spec, settings, metrics = Path(out), prepared.spec, prepared.settings, prepared.settings.metrics
    if make_steps is None and (problem := run_problem(spec, out, overwrite=overwrite, step=step)):
        raise RunDirectoryError(problem)
    opening = partial(
        RunDirectory.open,
        out,
        settings=settings.resolved(),
        identity=settings.identity(),
        overwrite=overwrite,
        step=step,
        folders=spec.folders,
        chosen=spec.chosen,
    )
    if metrics.port is None:
        return await _run(prepared, opening, observers, make_steps)
    async with serving_numbers(prepared.numbers, host=metrics.host, port=metrics.port) as address:
        _log.info("metrics for Prometheus: %s", address)
        return await _run(prepared, opening, [*observers, prepared.numbers], make_steps)


async def _run(
    prepared: PreparedRun,
    opening: Callable[[], RunDirectory],
    observers: Sequence[RolloutObserver],
    make_steps: MakeSteps | None,
) -> RunSummary:
    settings = prepared.settings
    with opening() as directory, run_log(directory.path), _storing_failure(directory):
        keep_server_logs(prepared.engine, directory.path)
        prepared.model.store.open(directory.path / PICTURES)
        rollouts = open_rollouts(
            settings,
            functions=prepared.functions,
            source=prepared.source,
            engine=prepared.engine,
            tokenizer=prepared.model.tokenizer,
            state=directory.state,
            commit=partial(_commit, directory, prepared),
            observers=observers,
            on_isolation=directory.record_isolation,
            printed=directory.path / PRINTED,
            spill=directory.spill,
            turns=directory.turns,
        )
        resumed = rollouts.next_step
        progress.info("rollfeed %s, process %d: begins with step %d", __version__, os.getpid(), resumed)
        async with tracked(prepared.trackers, directory.path, settings, first_step=resumed):
            async with rollouts:
                with once_started():
                    ended = await (make_steps or partial(_make_all, num_rollout=settings.rollout.num_rollout))(rollouts)
            directory.finish(ended)
    return RunSummary(
        directory=directory.path,
        num_steps=rollouts.next_step,
        num_resumed_steps=resumed,
        ledger=rollouts.ledger,
        early_end=ended,
    )


def tracked(
    trackers: Trackers, out: Path, settings: Settings, *, first_step: int = 0
) -> AbstractAsyncContextManager[None]:
    """Begin trackers, to be told what happens in the block; what they keep and print goes into the directory."""
    return trackers.following(
        out, tree=settings.resolved(), first_step=first_step, folder=out / TRACKERS, prints=out / PRINTED
    )


async def _make_all(rollouts: Rollouts, *, num_rollout: int) -> str | None:
    try:
        while rollouts.next_step < num_rollout:
            await rollouts.generate_batch()
    except PromptsEndedError as ended:
        return early_end(ended, rollouts, num_rollout=num_rollout)
    return None


def _commit(directory: RunDirectory, prepared: PreparedRun, commit: StepCommit) -> None:
    if prepared.model.store.has_any:
        prepared.model.store.keep(commit.pictures.values())  # before: what is committed has its pictures
    directory.commit(commit, reward_key=prepared.settings.reward.reward_key)
    told, metrics = ("rollout/reward_mean", "rollout/response_length_mean", "perf/step_seconds"), commit.batch.metrics
    numbers = ", ".join(f"{name} {metrics[name]:.4g}" for name in told if name in metrics)
    progress.info("step %d is stored, %d groups dropped: %s", commit.batch.step, len(commit.dropped), numbers)
    prepared.trackers.log_batch(commit.batch)


@contextmanager
def _storing_failure(directory: RunDirectory) -> Iterator[None]:
    """Store why the block fails, if it does."""
    try:
        yield
    except RollfeedError as error:
        progress.error("failed: %s", error)
        directory.fail(str(error))
        raise
    except COMPUTING_ERRORS as error:
        progress.exception("failed")
        failed = RunFailedError(f"a computation failed: {in_one_line(error)}")
        directory.fail(str(failed))
        raise failed from error
    except asyncio.CancelledError:
        progress.info("stopped")
        raise
    progress.info("finished")


def run_problem(spec: RunSpec, out: Path, *, overwrite: bool, step: int | Rewind | None) -> str | None:
    """Return why a run can neither begin nor be resumed in a directory; None if it can. Nothing is changed."""
    if holds_training(out) and not overwrite:
        return (
            f"{out}: holds a training, which batches alone would not go on with: use rollfeed train FILE --out {out}, "
            "or choose another directory"
        )
    identity = spec.settings.identity()
    return RunDirectory.problem(out, identity=identity, overwrite=overwrite, step=step, chosen=spec.chosen)


def early_end(ended: PromptsEndedError, rollouts: Rollouts, *, num_rollout: int) -> str:
    """Return the line that says why a run has fewer batches than it was asked for.

    Raises:
        PromptsEndedError: If it has none at all.
    """
    if rollouts.next_step == 0:
        raise ended
    counts = rollouts.ledger
    num_left = counts.requeued + counts.surplus + counts.in_flight
    num_batches = f"{rollouts.next_step} batch{'es' * (rollouts.next_step != 1)}"
    left = f"; prompts left over: {num_left} ({ended})" if num_left else ""
    return f"the data ended after {num_batches}; {num_rollout} were asked for{left}"
