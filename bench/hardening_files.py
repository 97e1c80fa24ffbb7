"""Flip single bits of all files of runs of every kind, and count those that nobody notices; time what digests cost.

Run it with::

    python bench/hardening_files.py --flips 10000 --seed 1 --out bench/hardening_files.json

A run in which a tiny model sees, one with a teacher, asynchronous and partial ones with a buffer, and one of several
turns that is killed in the middle are made in a temporary folder. Half of the flips fall on files in equal shares, so
that small ones get theirs, the other half by size. After each flip the file is read through the public reader.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np

from rollfeed.app.verifying import file_checks
from rollfeed.base.atomic import DIGESTS, Digest, replace_file
from rollfeed.benchmarks.machine import command_environment, machine
from rollfeed.errors import RunDirectoryError
from rollfeed.store import RunDirectory, RunReader, journal, run_directory, states
from rollfeed.store.layout import JOURNAL, METRICS, STEP_FOLDERS
from rollfeed.testing import group_of, make_prompt, sample_of
from rollfeed.types import LedgerCounts, RunState, StepCommit, TrainBatch

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ["train.checkpoint_interval=1", "train.eval_interval=1", "eval.num_prompts=4"]
KILLED, WORDS = "turns", "words.jsonl"
DATA = f"prompts.datasets=[{{path='{{folder}}/{WORDS}',label_key='label',apply_chat_template=false}}]"
RUNS = {
    "sft": (
        "train",
        "distillation/teacher.toml",
        ["rollout.num_rollout=2", "rollout.rollout_batch_size=8", DATA, *TINY],
    ),
    "pictures": ("train", "pictures/train.toml", ["rollout.num_rollout=3", "rollout.rollout_batch_size=4", *TINY]),
    "teacher": (
        "train",
        "distillation/train.toml",
        [
            "rollout.num_rollout=3",
            "rollout.rollout_batch_size=8",
            "teacher.checkpoint={folder}/sft/model",
            "train.warm_up=",
            *TINY,
        ],
    ),
    "async": ("run", "demo/demo.toml", ["rollout.num_rollout=4", "rollout.mode=async"]),
    "partial": ("run", "demo/demo.toml", ["rollout.num_rollout=4", "rollout.mode=partial"]),
}
Found = Counter[tuple[str, str]]


def main() -> None:
    """Make the runs, flip their bits, exchange their files, and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=Path, help="a folder for the runs, or that has them from an earlier call")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollfeed-flips-") as name:
        folder = arguments.runs or Path(name)
        names = (*RUNS, KILLED)
        runs = [folder / each for each in names] if (folder / KILLED).exists() else make_runs(folder)
        sizes = {path: path.stat().st_size for run in runs for path in run.rglob("*") if path.is_file()}
        flips = flip_bits(runs, sizes, random.Random(arguments.seed), arguments.flips)
        exchanges = exchange_files(runs)
    figures = {
        **flips,
        "exchanged": exchanges,
        "commit": commit_costs(),
        "bytes": sum(sizes.values()),
        "files": len(sizes),
        "command": f"python bench/hardening_files.py --flips {arguments.flips} --seed {arguments.seed}",
        "seed": arguments.seed,
        "machine": machine(),
    }
    text = json.dumps(figures, indent=2) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


def make_runs(folder: Path) -> list[Path]:
    """Return runs of every kind, the last of them killed."""
    folder.mkdir(parents=True, exist_ok=True)
    words: list[str | Path] = [sys.executable, EXAMPLES / "sft" / "write_words.py", folder / WORDS, "0", "64"]
    subprocess.run(words, env=command_environment(), check=True)
    for name, (command, settings, overrides) in RUNS.items():
        options = [word for each in overrides for word in ("--set", each.replace("{folder}", str(folder)))]
        words = [sys.executable, "-m", "rollfeed", command, EXAMPLES / settings, "--out", folder / name, *options]
        subprocess.run([*words, "--quiet"], env=command_environment(), stdout=subprocess.DEVNULL, check=True)
        print(f"made {name}", file=sys.stderr)
    return [*(folder / name for name in RUNS), killed_run(folder / KILLED)]


def killed_run(out: Path) -> Path:
    """Make a run of several turns, and kill it when a step is stored and turns of the next are journalled."""
    words: list[str | Path] = [
        sys.executable,
        "-m",
        "rollfeed",
        "run",
        EXAMPLES / "turns" / "turns.toml",
        "--out",
        out,
        "--quiet",
    ]
    process = subprocess.Popen([*words, "--set", "rollout.num_rollout=1000"], env=command_environment())
    needed = {out / METRICS: 1, out / "turns.log": 1000}
    while not all(path.exists() and path.stat().st_size >= size for path, size in needed.items()):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (out / f"{JOURNAL}-wal").exists()
    return out


def flip_bits(runs: list[Path], sizes: dict[Path, int], picks: random.Random, count: int) -> dict[str, Any]:
    """Flip single bits, and return how many were found, by the kind of file."""
    files = [path for path, size in sizes.items() if size and not path.name.endswith("-shm")]
    chosen = [picks.choice(files) for _ in range(count // 2)]
    chosen += picks.choices(files, weights=[sizes[path] for path in files], k=count - len(chosen))
    values = {run: journal_values(run) for run in runs}
    found: Found = Counter()
    missed, uncovered = [], Counter[str]()
    for number, path in enumerate(sorted(chosen)):
        run = next(each for each in runs if path.is_relative_to(each))
        name, bit = str(path.relative_to(run)), picks.randrange(8 * sizes[path])
        with flipped(path, bit):
            outcome = outcome_in_journal(run, values[run]) if name.startswith(JOURNAL) else outcome_in_file(run, name)
        kind = kind_of(name)
        found[kind, outcome] += 1
        if outcome == "missed":
            missed.append({"run": run.name, "file": name, "bit": bit})
        if outcome == "not covered":
            uncovered[kind] += 1
        if number % 500 == 0:
            print(f"{number} flips", file=sys.stderr)
    kinds = sorted({kind for kind, _ in found})
    by_kind = {kind: {outcome: n for (each, outcome), n in sorted(found.items()) if each == kind} for kind in kinds}
    bytes_of = Counter[str]()
    for path, size in sizes.items():
        bytes_of[kind_of(str(path.relative_to(next(each for each in runs if path.is_relative_to(each)))))] += size
    return {
        "flips": count,
        "by_kind": by_kind,
        "missed": missed,
        "uncovered_bytes": {kind: bytes_of[kind] for kind in uncovered},
        "bytes_by_kind": dict(sorted(bytes_of.items())),
    }


def kind_of(name: str) -> str:
    """Return the folder of a file, or its own name."""
    return name.partition("/")[0]


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """Have a bit flipped in the block."""
    with path.open("r+b", buffering=0) as file:
        file.seek(bit // 8)
        before = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([before[0] ^ 1 << bit % 8]))
    try:
        yield
    finally:
        with path.open("r+b", buffering=0) as file:
            file.seek(bit // 8)
            file.write(before)


def outcome_in_file(run: Path, name: str) -> str:
    """Return whether the file of that name is said to be another, through the reader where that has it."""
    folder, _, file = name.partition("/")
    with RunReader(run) as reader:
        step = int(file[5:11]) if folder in STEP_FOLDERS else None
        if step is not None and step in reader.step_numbers():
            with suppress(RunDirectoryError):
                reader.file(folder, step)
                return "missed"
            return "found"
        # A digest that is another one is told of the file that it is of.
        near = f"{Path(name).parent}/" if name.endswith(DIGESTS) else name
        checks = [check for check in file_checks(reader) if check.name.startswith(near)]
        if not checks or not checks[0].is_vouched:
            return "not covered"
        return "missed" if all(check.problem() is None for check in checks) else "found"


def journal_values(run: Path) -> Any:
    """Return everything that is read from a journal."""
    for path in run.glob(f"{JOURNAL}-shm"):  # which sqlite makes of the others
        path.unlink()
    with RunReader(run) as reader:
        return reader.run(), reader.changes(), reader.step_numbers(), reader.steps(), reader.vouched()


def outcome_in_journal(run: Path, before: Any) -> str:
    """Return whether what is read is as before, refused, or, by the files that the journal lacks then, another."""
    try:
        if journal_values(run) == before:
            return "no value changed"
        with RunReader(run) as reader:
            checks = [check for check in file_checks(reader) if check.name == METRICS or check.name[:6] == "batche"]
            return "found" if any(check.problem() is not None for check in checks) else "missed"
    except RunDirectoryError:
        return "found"


def exchange_files(runs: list[Path]) -> dict[str, int]:
    """Remove, cut and exchange every file of a step, and return how many times that was noticed or not."""
    counts = Counter[str]()
    for run in runs:
        for path in sorted(path for folder in STEP_FOLDERS for path in (run / folder).glob("step-*")):
            name = str(path.relative_to(run))
            others = [each for other in runs for each in (other / path.parent.name).glob("step-*") if each != path]
            for how, damage in damages(path, others).items():
                content = path.read_bytes()
                damage()
                same = path.exists() and path.read_bytes() == content
                outcome = "equal file" if same else outcome_in_file(run, name)
                counts[f"{how.rstrip('0123456789 ')}, {outcome}"] += 1
                path.write_bytes(content)
    return dict(sorted(counts.items()))


def damages(path: Path, others: list[Path]) -> dict[str, Callable[[], object]]:
    """Return what is done to a file."""
    return {
        "removed": path.unlink,
        "cut short": lambda: os.truncate(path, path.stat().st_size - 1),
        "emptied": lambda: os.truncate(path, 0),
        **{f"exchanged {number}": partial(shutil.copyfile, other, path) for number, other in enumerate(others)},
    }


def commit_costs(*, steps: int = 40, groups: int = 32, samples: int = 8, tokens: int = 500) -> dict[str, Any]:
    """Commit with digests and seals and without, in turn, and return the medians and their ratios."""
    picks = np.random.default_rng(0)
    taken: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory(prefix="rollfeed-commits-") as name:
        opened = {
            kind: RunDirectory.open(Path(name, kind), settings={}, identity={}, overwrite=False) for kind in taken
        }
        for step in range(steps):
            commit = commit_of(step, picks, groups, samples, tokens)
            for kind in ("with", "without") if step % 2 else ("without", "with"):
                with without_digests() if kind == "without" else nullcontext():
                    wall, cpu = time.perf_counter(), time.process_time()
                    opened[kind].commit(commit, reward_key=None)
                    taken[kind].append((time.perf_counter() - wall, time.process_time() - cpu))
        for each in opened.values():
            each.close()
    medians = {kind: [median(column) for column in zip(*each[4:], strict=True)] for kind, each in taken.items()}
    return {
        "groups": groups,
        "samples_of_a_group": samples,
        "tokens_of_a_sample": tokens,
        "steps": steps - 4,
        "wall_ms": {kind: 1e3 * wall for kind, (wall, _) in medians.items()},
        "cpu_ms": {kind: 1e3 * cpu for kind, (_, cpu) in medians.items()},
        "wall_ratio": medians["with"][0] / medians["without"][0],
        "cpu_ratio": medians["with"][1] / medians["without"][1],
    }


@contextmanager
def without_digests() -> Iterator[None]:
    """Have files written and rows stored as before there were digests and seals."""

    def replace(path: Path, write: Any) -> Digest:
        replace_file(path, write)
        return Digest(0, "")

    with (
        mock.patch.object(run_directory, "replace_digested", replace),
        mock.patch.object(states, "replace_digested", replace),
        mock.patch.object(journal, "seal_step"),
        mock.patch.object(journal, "seal_run"),
    ):
        yield


def commit_of(step: int, picks: np.random.Generator, groups: int, samples: int, tokens: int) -> StepCommit:
    """Return a step of random tokens."""
    made = []
    for index in range(step * groups, (step + 1) * groups):
        members = [
            sample_of(
                range(100),
                picks.integers(0, 50_000, tokens),
                logprobs=picks.normal(-1, 0.5, tokens).astype(np.float32),
                group_index=index,
                index=index * samples + number,
                rollout_id=index * samples + number,
                reward=float(number % 2),
            )
            for number in range(samples)
        ]
        made.append(group_of(members, prompt=make_prompt(str(index))))
    advantages = np.zeros(groups * samples, np.float32)
    drawn = (step + 1) * groups
    state = RunState(
        next_step=step + 1, next_group_index=drawn, source={}, ledger=LedgerCounts(drawn=drawn, trained=drawn)
    )
    batch = TrainBatch(step=step, policy_version=0, groups=tuple(made), advantages_S=advantages, metrics={})
    return StepCommit(batch=batch, dropped=(), wasted_tokens={}, state=state)


if __name__ == "__main__":
    main()
