"""A training's part of a run directory: the trainer's states, its logs and the model; and whether it can go on there.

Invariant: what has its name is whole; a process that is killed leaves at most a folder with a temporary one.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollfeed.base.atomic import replace_file, replace_folder, seal_folder
from rollfeed.config import RunSpec, Settings
from rollfeed.errors import RunFailedError
from rollfeed.model_files import CONFIG_FILE
from rollfeed.report import Curves, curves_of
from rollfeed.store import RunDirectory, RunReader, RunStatus
from rollfeed.store.json_text import read_records
from rollfeed.store.layout import (
    ADAPTER,
    CHECKPOINTS,
    EVAL_LOG,
    EXPORT_FILE,
    JOURNAL,
    METRICS,
    MODEL,
    TRAIN_LOG,
    WARM_UP,
    holds_training,
)
from rollfeed.weights import write_checkpoint

if TYPE_CHECKING:
    from rollfeed.app.training.remote_trainer import RunTrainer

_NUM_KEPT = 2
_CHECKPOINT_NAME = re.compile(r"step-\d{6,}")


def newest_checkpoint(out: Path) -> int | None:
    """Return the batch after which the newest whole checkpoint of a run directory was written; None without one."""
    found = _step_folders(out)
    return _step_of(found[-1]) if found else None


def checkpoint_folders(out: Path) -> list[Path]:
    """Return where the states of the trainer are, that after the warm-up among them."""
    return [*_step_folders(out), *([out / CHECKPOINTS / WARM_UP] if has_warm_up(out) else [])]


def _step_folders(out: Path) -> list[Path]:
    if not (out / CHECKPOINTS).is_dir():
        return []
    return sorted(
        (path for path in (out / CHECKPOINTS).iterdir() if _CHECKPOINT_NAME.fullmatch(path.name)), key=_step_of
    )


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def has_steps(out: Path) -> bool:
    """Whether a run is there that has made a batch."""
    if not (out / JOURNAL).exists():
        return False
    with RunReader(out) as reader:
        return bool(reader.steps())


def where_it_goes_on(out: Path) -> str | None:
    """Say where the training in a directory goes on; None where there is none."""
    newest = newest_checkpoint(out)
    if newest is not None:
        return f"goes on at step {newest + 1} from {_step_folder(out, newest)}"
    if has_warm_up(out):
        return f"goes on at step 0 from {out / CHECKPOINTS / WARM_UP}, after the warm-up"
    return "begins again at step 0: no checkpoint was written" if holds_training(out) else None


def restore(trainer: RunTrainer, out: Path, newest: int | None) -> None:
    """Take a trainer to where an earlier process left it."""
    if (out / CHECKPOINTS / WARM_UP).exists():
        trainer.load(out / CHECKPOINTS / WARM_UP)
        trainer.take_as_reference()
    if newest is not None:
        trainer.load(_step_folder(out, newest))


def _step_folder(out: Path, step: int) -> Path:
    return out / CHECKPOINTS / f"step-{step:06d}"


def save_step(trainer: RunTrainer, out: Path, step: int) -> None:
    """Write the state after the batch ``step`` and remove all but the last two; blocks for the disk."""
    (out / CHECKPOINTS).mkdir(exist_ok=True)
    if not _step_folder(out, step).exists():
        trainer.save(_step_folder(out, step))
    for path in _step_folders(out)[:-_NUM_KEPT]:
        shutil.rmtree(path)


def has_warm_up(out: Path) -> bool:
    """Whether the state after the warm-up is there."""
    return (out / CHECKPOINTS / WARM_UP).exists()


def save_warm_up(trainer: RunTrainer, out: Path) -> None:
    """Write the state after the warm-up; blocks for the disk."""
    (out / CHECKPOINTS).mkdir(exist_ok=True)
    trainer.save(out / CHECKPOINTS / WARM_UP)


def export_model(
    trainer: RunTrainer,
    out: Path,
    *,
    checkpoint: Path,
    chat_template: str | None = None,
    name: str = MODEL,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write the trained model as a folder in Hugging Face layout, which every command takes as ``model.checkpoint``.

    An adapter that was trained is merged there, and in a folder ``adapter`` of its own, in peft's layout. Configuration
    and tokenizer are copied from ``checkpoint``, which the model was loaded from, and the chat template
    from the file ``chat_template``, where there is one. With ``about``, that and digests are in files beside them.

    Raises:
        RunFailedError: If the disk does not take it.
    """

    def write(folder: Path) -> None:
        write_checkpoint(trainer.weights(), folder, checkpoint=checkpoint)
        if changes := getattr(trainer, "config_changes", None):  # what is trained is of another class
            path = folder / CONFIG_FILE
            config = {**json.loads(path.read_text(encoding="utf-8")), **changes}
            path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        if (adapter := getattr(trainer, "adapter", None)) is not None:
            adapter.write_adapter(folder / ADAPTER, base=checkpoint)
        if chat_template is not None:
            shutil.copyfile(chat_template, folder / "chat_template.jinja")
        if about is not None:
            (folder / EXPORT_FILE).write_text(json.dumps(about) + "\n", encoding="utf-8")
            seal_folder(folder)

    try:
        replace_folder(out / name, write)
    except OSError as error:
        raise RunFailedError(f"{out / name}: the trained model cannot be written: {error}") from error


def directory_problem(spec: RunSpec, out: Path, *, overwrite: bool) -> str | None:
    """Return why training can neither begin nor go on in a directory; None if it can. Nothing is changed.

    A finished training goes on when ``rollout.num_rollout`` is larger than it was.
    """
    settings, newest = spec.settings, None if overwrite else newest_checkpoint(out)
    if newest is not None and (problem := _finished_problem(settings, out, newest)):
        return problem
    step = newest if newest is not None and newest + 1 < settings.rollout.num_rollout else None
    identity = settings.identity()
    problem = RunDirectory.problem(out, identity=identity, overwrite=overwrite, step=step, chosen=spec.chosen)
    if problem is None and not overwrite and not holds_training(out) and has_steps(out):
        return (
            f"{out}: holds a run that was not trained on; go on with rollfeed run --resume {out}, choose another "
            "--out, or replace it with --overwrite"
        )
    return problem


def _finished_problem(settings: Settings, out: Path, newest: int) -> str | None:
    """Return why a training whose newest checkpoint is that after batch ``newest`` has nothing left to do."""
    with RunReader(out) as reader:
        run = reader.run()
    if run.status is not RunStatus.FINISHED:
        return None
    has, remedy = f"{out}: holds a finished training of {newest + 1} batches", "rollout.num_rollout"
    if newest + 1 < settings.rollout.num_rollout:
        # Of a prompt source of the user's nobody knows whether there is more by now.
        stored = run.settings.get("prompts", {}).get("num_epoch")
        if not run.cause or settings.plugins.prompt_source or stored != settings.prompts.num_epoch:
            return None
        has, remedy = f"{has} ({run.cause})", "prompts.num_epoch"
    return f"{has}; raise {remedy} to train on, choose another --out, or replace it with --overwrite"


def run_curves(out: Path) -> Curves:
    """Return the curves of a run directory as its logs have them now; empty ones where nothing was trained."""
    return curves_of(
        evaluations=read_records(out / EVAL_LOG),
        trained=read_records(out / TRAIN_LOG),
        metrics=read_records(out / METRICS),
    )


class RecordLog:
    """One line of JSON a record; those that a process which goes on will make again are taken out."""

    def __init__(self, path: Path, *, keep: Callable[[dict[str, Any]], bool]) -> None:
        self._path = path
        kept = [record for record in read_records(path) if keep(record)]
        replace_file(path, lambda file: file.write("".join(map(_line, kept)).encode()))
        self.records: list[Mapping[str, Any]] = list(kept)
        """Those of earlier processes included."""

    def add(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(record))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"
