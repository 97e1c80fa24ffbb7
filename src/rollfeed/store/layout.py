"""The files that a run directory has.

::

    run.lock                     held by the process that works on the run
    journal.sqlite               what is committed; a step exists when it is in here
    steps.jsonl                  the account of each step: counts, metrics, ledger
    settings.json                the resolved settings
    isolation.json               at which isolation level programs ran, if any did
    train.jsonl, eval.jsonl      a line a batch trained on, and a line an evaluation, if the run trains
    checkpoints/step-000009/     the trainer after that batch
    model/                       the trained model in Hugging Face layout, when the run is finished
    exports/step-000120/         the same after 120 batches, and what was found of it in export.json
    exports/best/                the same after the best evaluation
    curve.png, curve.html        the curves, drawn anew after every evaluation
    warm-up.jsonl                a line a measurement of the warm-up, if the run has one
    checkpoints/warm-up/         the trainer after it
    metrics.jsonl                one line a step, derived from steps.jsonl
    batches/step-000001.parquet  the batch of a step
    dropped/step-000001.parquet  the groups it dropped, if any
    timings/step-000001.parquet  times and cache counters of both
    states/step-000001.state     what the next step starts from
    spill/                       draws that do not fit into memory, of no use to another process
    run.log, run.log.1           what was logged, with times; the older half of it
    rewards.log                  what reward functions and environments printed, if anything
    pictures/0f3a...png          pictures that prompts have shown, each once, named by its hash, if there are any
    servers/0.log                what servers have said that the run has started, if any
    turns.log                    what rollouts of several turns have done whose groups are not committed, if any
    trackers/                    what trackers keep here, and how far they were told, if there are any
    set-aside/1/                 what was behind the step that the run was taken back to, as damaged
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollfeed.base.atomic import DIGESTS, open_regular
from rollfeed.logs import RUN_LOGS
from rollfeed.model_files import BESIDE_WEIGHTS

LOCK = "run.lock"
JOURNAL = "journal.sqlite"
SETTINGS = "settings.json"
ISOLATION = "isolation.json"
TRAIN_LOG, EVAL_LOG, CHECKPOINTS = "train.jsonl", "eval.jsonl", "checkpoints"
WARM_UP_LOG, WARM_UP, MODEL = "warm-up.jsonl", "warm-up", "model"
EXPORTS, BEST, EXPORT_FILE, ADAPTER = "exports", "best", "export.json", "adapter"
GROWING_FILES = (TRAIN_LOG, EVAL_LOG, WARM_UP_LOG)
"""What a trainer appends to while steps are made."""
TURNS = "turns.log"
PRINTED = "rewards.log"
_FILES_OF_BEFORE = (TRAIN_LOG, EVAL_LOG, WARM_UP_LOG, "curve.png", "curve.html", TURNS, PRINTED, *RUN_LOGS)
SERVERS = "servers"
TRACKERS = "trackers"
SET_ASIDE = "set-aside"
PICTURES = "pictures"
_STATE_NAMES = rf"trainer\.safetensors|trainer\.json|{re.escape(DIGESTS)}"
_MODEL_NAMES = re.compile(
    "|".join(f"[^/]*{re.escape(each[1:])}" for each in (*BESIDE_WEIGHTS, "*.safetensors"))
    + rf"|(?:additional_chat_templates|{ADAPTER})/[^/]*"
)
_OWN_NAMES = {
    CHECKPOINTS: re.compile(rf"\.?(?:step-\d{{6,}}|{WARM_UP})(?:\.tmp)?/(?:{_STATE_NAMES})"),
    MODEL: _MODEL_NAMES,
    f".{MODEL}.tmp": _MODEL_NAMES,
    EXPORTS: re.compile(rf"\.?(?:step-\d{{6,}}|{BEST})(?:\.tmp)?/(?:{_MODEL_NAMES.pattern})"),
    SERVERS: re.compile(r"\d+\.log"),
    PICTURES: re.compile(r"\.?[0-9a-f]{64}\.\w+(?:\.tmp)?"),
}
"""What a run puts into a folder, by their paths in it."""
METRICS = "metrics.jsonl"
RESULT_FILE, ANSWERS_FILE = "eval.json", "answers.parquet"
"""What `rollfeed eval` leaves in its folder."""
STEPS = "steps.jsonl"
SPILL = "spill"
BATCHES, DROPPED, TIMINGS, STATES = "batches", "dropped", "timings", "states"
STEP_FOLDERS = (BATCHES, DROPPED, TIMINGS, STATES)

_STEP_FILE = re.compile(r"step-(\d{6,})\.(?:parquet|state)")
_EXPORT = re.compile(r"step-(\d{6,})")
_TEMPORARY_STEP_FILE = re.compile(r"\.step-\d{6,}\.(?:parquet|state)\.tmp")
_TEMPORARY_FILES = frozenset(
    {f".{name}.tmp" for name in (SETTINGS, ISOLATION, METRICS, JOURNAL, TURNS)}
    | {f".{JOURNAL}.tmp-{suffix}" for suffix in ("journal", "wal")}
)


def step_file(directory: Path, folder: str, step: int) -> Path:
    """Return where a step's file of one kind is."""
    return directory / folder / f"step-{step:06d}.{'state' if folder == STATES else 'parquet'}"


def export_folders(directory: Path) -> list[Path]:
    """Return where models of a training are that was not at its end, those of steps in order."""
    found = sorted((directory / EXPORTS).glob("*"), key=lambda path: (len(path.name), path.name))
    steps = [path for path in found if _EXPORT.fullmatch(path.name)]
    return [*steps, *(path for path in found if path.name == BEST)]


def exported_step(folder: Path) -> int:
    """Return the number of batches that the model in an export has been trained on; -1 where it does not say."""
    match = _EXPORT.fullmatch(folder.name)
    return int(match[1]) if match else export_facts(folder).get("step", -1)


def export_facts(folder: Path) -> dict[str, Any]:
    """Return the ``step`` of an export, and the number that was found of it, by name; empty where that is damaged."""
    with suppress(OSError, ValueError), open_regular(folder / EXPORT_FILE) as file:
        facts = json.load(file)
        if isinstance(facts, dict) and isinstance(facts.get("step"), int):
            return {name: value for name, value in facts.items() if isinstance(value, int | float)}
    return {}


def may_precede_journal(name: str) -> bool:
    """Whether a start that was killed before there was a journal can have left this entry."""
    return name == LOCK or name in _TEMPORARY_FILES


def holds_training(directory: Path) -> bool:
    """Whether the run in a directory is a training."""
    return (directory / TRAIN_LOG).exists()


def remove_training_files(directory: Path) -> None:
    """Remove what a trainer, turns, pictures and trackers left, for a run that replaces its own; nothing else."""
    for name in _FILES_OF_BEFORE:
        (directory / name).unlink(missing_ok=True)
    for memory in (directory / TRACKERS).glob("*.json"):
        shutil.rmtree(memory.with_suffix(""), ignore_errors=True)
        memory.unlink()
    for folder, own in _OWN_NAMES.items():
        for path in sorted((directory / folder).rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                with suppress(OSError):  # others have put something there
                    path.rmdir()
            elif own.fullmatch(str(path.relative_to(directory / folder))):
                path.unlink()
    for emptied in (*_OWN_NAMES, TRACKERS):
        with suppress(OSError):
            (directory / emptied).rmdir()


def remove_uncommitted(directory: Path, committed: frozenset[int]) -> None:
    """Remove what an interrupted process left: temporary files, and files of steps that are not committed.

    Nothing that rollfeed did not write is touched.
    """
    for name in _TEMPORARY_FILES:
        (directory / name).unlink(missing_ok=True)
    for folder in STEP_FOLDERS:
        for path in (directory / folder).iterdir():
            match = _STEP_FILE.fullmatch(path.name)
            if _TEMPORARY_STEP_FILE.fullmatch(path.name) or (match and int(match[1]) not in committed):
                path.unlink()
