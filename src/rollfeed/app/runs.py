"""A whole run, made step by step; and what can be said of its directory before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rollfeed.app.build import PreparedRun, open_rollouts
from rollfeed.config import RunSpec
from rollfeed.errors import (
    COMPUTING_ERRORS,
    PromptsEndedError,
    RollfeedError,
    RunDirectoryError,
    RunFailedError,
    in_one_line,
)
from rollfeed.faults import blaming, once_started
from rollfeed.pipeline import Rollouts
from rollfeed.protocols import RolloutObserver, Tracker
from rollfeed.store import Rewind, RunDirectory
from rollfeed.store.layout import holds_training
from rollfeed.types import LedgerCounts, StepCommit

_TRACKER = "plugins.tracker"


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
    out: Path,
    overwrite: bool = False,
    step: int | None = None,
    observers: Sequence[RolloutObserver] = (),
) -> RunSummary:
    """Make all steps of a run, or those that an earlier process left to do.

    With ``step`` the run in ``out`` goes back to its state after that committed step first.

    Raises:
        RunDirectoryError: If ``out`` cannot be used; nothing has been started then.
        RollfeedError: If the run fails; finished steps stay readable, and the same call resumes it.
    """
    if problem := run_problem(prepared.spec, out, overwrite=overwrite, step=step):
        raise RunDirectoryError(problem)
    num_rollout = prepared.settings.rollout.num_rollout

    async def make_all(rollouts: Rollouts) -> str | None:
        try:
            while rollouts.next_step < num_rollout:
                await rollouts.generate_batch()
        except PromptsEndedError as ended:
            return early_end(ended, rollouts, num_rollout=num_rollout)
        return None

    return await make_steps(prepared, make_all, out=out, overwrite=overwrite, step=step, observers=observers)


def run_problem(spec: RunSpec, out: Path, *, overwrite: bool, step: int | None) -> str | None:
    """Return why a run can neither begin nor be resumed in a directory; None if it can. Nothing is changed."""
    if holds_training(out) and not overwrite:
        return (
            f"{out}: holds a training, which batches alone would not go on with: use rollfeed train FILE --out {out}, "
            "or choose another directory"
        )
    identity = spec.settings.identity()
    return RunDirectory.problem(out, identity=identity, overwrite=overwrite, step=step, chosen=spec.chosen)


async def make_steps(
    prepared: PreparedRun,
    body: Callable[[Rollouts], Awaitable[str | None]],
    *,
    out: Path,
    overwrite: bool,
    step: int | Rewind | None,
    observers: Sequence[RolloutObserver],
) -> RunSummary:
    """Have ``body`` make the steps of a run in ``out``, where it begins or goes on, and store how the run ended.

    Args:
        prepared: The run.
        body: Makes the steps with a manager that goes on from there; returns why it made fewer than it was asked for,
            if it did.
        out: The run directory, ``overwrite`` and ``step`` as for :meth:`RunDirectory.open`.
        overwrite: See there.
        step: See there.
        observers: Told what happens as it happens.

    Raises:
        RollfeedError: If the run fails; the cause is stored.
    """
    spec = prepared.spec
    with RunDirectory.open(
        out,
        settings=spec.settings.model_dump(mode="json"),
        identity=spec.settings.identity(),
        overwrite=overwrite,
        step=step,
        folders=spec.folders,
        chosen=spec.chosen,
    ) as directory:
        try:
            rollouts = _open_run(prepared, directory, observers)
            resumed = rollouts.next_step
            with _closing(prepared.tracker):
                async with rollouts:
                    with once_started():
                        ended = await body(rollouts)
                directory.finish(ended)
        except RollfeedError as error:
            directory.fail(str(error))
            raise
        except COMPUTING_ERRORS as error:
            failed = RunFailedError(f"a computation failed: {in_one_line(error)}")
            directory.fail(str(failed))
            raise failed from error
    return RunSummary(
        directory=directory.path,
        num_steps=rollouts.next_step,
        num_resumed_steps=resumed,
        ledger=rollouts.ledger,
        early_end=ended,
    )


def _open_run(prepared: PreparedRun, directory: RunDirectory, observers: Sequence[RolloutObserver]) -> Rollouts:
    """Return a manager that stores its steps in ``directory`` and goes on from there."""
    settings, tracker = prepared.settings, prepared.tracker

    def commit(step: StepCommit) -> None:
        directory.commit(step, reward_key=settings.reward.reward_key)
        if tracker is not None:
            with blaming(_TRACKER, tracker):
                tracker.log(step.batch.metrics, step=step.batch.step)

    return open_rollouts(
        settings,
        functions=prepared.functions,
        source=prepared.source,
        engine=prepared.engine,
        tokenizer=prepared.model.tokenizer,
        state=directory.state,
        commit=commit,
        observers=observers,
        on_isolation=directory.record_isolation,
        spill=directory.spill,
        turns=directory.turns,
    )


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


@contextmanager
def _closing(tracker: Tracker | None) -> Iterator[None]:
    """Close a tracker at the end; where the run has failed, nothing that it raises then hides why."""
    try:
        yield
    except BaseException:
        if tracker is not None:
            with suppress(Exception):
                tracker.close()
        raise
    if tracker is not None:
        with blaming(_TRACKER, tracker):
            tracker.close()
