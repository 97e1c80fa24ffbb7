"""The trainer's states in a run directory, and the model that it leaves.

Invariant: what has its name is whole; a process that is killed leaves at most a folder with a temporary one.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rollfeed.engine.weight_folders import write_checkpoint
from rollfeed.errors import RunFailedError
from rollfeed.store import RunReader
from rollfeed.store.layout import CHECKPOINTS, JOURNAL, MODEL, WARM_UP, holds_training

if TYPE_CHECKING:
    from rollfeed.training.trainer import Trainer

_NUM_KEPT = 2
_CHECKPOINT_NAME = re.compile(r"step-(\d{6,})")


def newest_checkpoint(out: Path) -> int | None:
    """Return the batch after which the newest whole checkpoint of a run directory was written; None without one."""
    if not (out / CHECKPOINTS).is_dir():
        return None
    found = [match for path in (out / CHECKPOINTS).iterdir() if (match := _CHECKPOINT_NAME.fullmatch(path.name))]
    return max((int(match[1]) for match in found), default=None)


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


def restore(trainer: Trainer, out: Path, newest: int | None) -> None:
    """Take a trainer to where an earlier process left it."""
    if (out / CHECKPOINTS / WARM_UP).exists():
        trainer.load(out / CHECKPOINTS / WARM_UP)
        trainer.take_as_reference()
    if newest is not None:
        trainer.load(_step_folder(out, newest))


def _step_folder(out: Path, step: int) -> Path:
    return out / CHECKPOINTS / f"step-{step:06d}"


def save_step(trainer: Trainer, out: Path, step: int) -> None:
    """Write the state after the batch ``step`` and remove all but the last two; blocks for the disk."""
    (out / CHECKPOINTS).mkdir(exist_ok=True)
    if not _step_folder(out, step).exists():
        trainer.save(_step_folder(out, step))
    kept = sorted(path for path in (out / CHECKPOINTS).iterdir() if _CHECKPOINT_NAME.fullmatch(path.name))
    for path in kept[:-_NUM_KEPT]:
        shutil.rmtree(path)


def has_warm_up(out: Path) -> bool:
    """Whether the state after the warm-up is there."""
    return (out / CHECKPOINTS / WARM_UP).exists()


def save_warm_up(trainer: Trainer, out: Path) -> None:
    """Write the state after the warm-up; blocks for the disk."""
    (out / CHECKPOINTS).mkdir(exist_ok=True)
    trainer.save(out / CHECKPOINTS / WARM_UP)


def export_model(trainer: Trainer, out: Path, *, checkpoint: Path) -> None:
    """Write the trained model as a folder in Hugging Face layout, which every command takes as ``model.checkpoint``.

    Args:
        trainer: Whose weights are written.
        out: The run directory.
        checkpoint: What the model was loaded from; its configuration and tokenizer are copied.

    Raises:
        RunFailedError: If the disk does not take it.
    """
    temporary = out / f".{MODEL}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        write_checkpoint(trainer.weights(), temporary, checkpoint=checkpoint)
        shutil.rmtree(out / MODEL, ignore_errors=True)
        temporary.rename(out / MODEL)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunFailedError(f"{out / MODEL}: the trained model cannot be written: {error}") from error
