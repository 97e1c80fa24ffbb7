"""A tiny student that learns from a tiny teacher to reverse words: two seeds, and what it learns from other teachers.

Every run is a command of examples/distillation, started as a process. For each seed a teacher learns words from their
answers, and a student from the teacher alone, token by token. Beside them, with the first seed:

- ``reward``: the same teacher's divergence as one number an answer, compared within groups as rewards are;
- ``control``: a teacher that learned the same words with each other's answers: as sure of the form, and wrong.

Settings were tried on seed 0. With ``--busy`` the machine did other work at the same time: seconds are of that.

::

    python bench/distillation.py --output bench/distillation.json
"""

from __future__ import annotations

import argparse
import json
import runpy
import shlex
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from training_runs import records, tell, train

from rollfeed.benchmarks.machine import machine

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TEACHER, STUDENT = EXAMPLES / "distillation" / "teacher.toml", EXAMPLES / "distillation" / "train.toml"
NUM_WORDS = 38_400
TUNED_SEEDS = (0,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--busy", action="store_true", help="the machine does other work, so that no time is a figure")
    parser.add_argument("--folder", type=Path, help="keep the runs there (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        runs = [of_seed(seed, folder / f"seed-{seed}") for seed in arguments.seeds]
        first = arguments.seeds[0]
        reward = student(first, folder / "reward", folder / f"seed-{first}" / "teacher", "teacher.use=reward")
        wrong = teacher(first, folder / "control", shuffled=True)
        control = student(first, folder / "control" / "student", folder / "control" / "teacher")
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "busy": arguments.busy,
        "settings": {path.name: path.read_text(encoding="utf-8") for path in (TEACHER, STUDENT)},
        "runs": runs,
        "reward": reward,
        "control": {"teacher": wrong, "student": control},
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def of_seed(seed: int, folder: Path) -> dict[str, Any]:
    """Train a teacher and its student."""
    return {
        "seed": seed,
        "tuned_on": seed in TUNED_SEEDS,
        "teacher": teacher(seed, folder),
        "student": student(seed, folder / "student", folder / "teacher"),
    }


def teacher(seed: int, folder: Path, *, shuffled: bool = False) -> dict[str, Any]:
    """Train a teacher in ``folder / "teacher"``, with the answers handed out at random where it is to be wrong."""
    words = folder / "words.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    runpy.run_path(str(EXAMPLES / "sft" / "write_words.py"))["write"](words, seed=seed, num_rows=NUM_WORDS)
    if shuffled:
        rows = records(words)
        labels = [row["label"] for row in rows]
        Random(seed).shuffle(labels)
        told = [{**row, "label": label} for row, label in zip(rows, labels, strict=True)]
        words.write_text("".join(json.dumps(row) + "\n" for row in told), encoding="utf-8")
    run = train(TEACHER, folder / "teacher", seed=seed, overrides=[f"prompts.datasets.0.path={words}"])
    tell(run)
    return run


def student(seed: int, out: Path, teacher_run: Path, *overrides: str) -> dict[str, Any]:
    """Train a student by what the teacher of a run says; its divergence is told before and after."""
    run = train(STUDENT, out, seed=seed, overrides=[f"teacher.checkpoint={teacher_run / 'model'}", *overrides])
    divergences = [record["rollout/teacher_kl"] for record in records(out / "metrics.jsonl")]
    found = {**run, "teacher_kl": {"first": divergences[0], "last": divergences[-1]}}
    tell(found)
    return found


if __name__ == "__main__":
    main()
