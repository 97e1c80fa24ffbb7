"""Learning at levels that follow the answers, beside fixed ones; an adaptive data set, beside a plain one.

A character model is taught a little of reversing words of 2 to 9 letters, half of the labels wrong. From that model
five seeds of each arm train, two runs at a time, at words of 2 to 13 letters and on rewards of 1 and 0:

- ``band``: ``[prompts.adaptive]`` from level 0 on;
- ``mixed``: the same source with ``fixed``, all twelve levels alike;
- ``level-N``: one level all the time, the best of several by one seed of its own;
- ``rows-adaptive`` and ``rows-plain``: a data set of all levels, with ``adaptive = true`` and without.

Arms are compared at equal tokens: those that the arm with the fewest sampled, of each comparison. Given are the share
of groups with right and wrong answers until then and the accuracy on held-out words of all levels at that point, the
mean over seeds with its 95 % interval (Student's t), and the paired differences and ratios to ``band`` and
``rows-adaptive``.

::

    python bench/adaptive.py --output bench/adaptive.json
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollfeed.app.environments.task_makers import ChosenEnvironment, MakingPlan, sample_tasks
from rollfeed.benchmarks.machine import machine
from rollfeed.store import RunReader
from rollfeed.types import Correct, Prompt, Sample, Verdict

HERE = Path(__file__).parent
SEEDS, SEARCH_SEED = (0, 1, 2, 3, 4), 100
TAUGHT_LEVELS, LEVELS, SINGLE_LEVELS = range(8), range(12), (1, 3, 5)
NUM_ROWS = 800
PARAMETERS = {"style": "compact", "alphabet_size": 5}
STUDENT_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
COMMON = """
[engine]
context_length = 64
num_slots = 128
threads = 1

[sampling]
rollout_max_response_len = 16
rollout_skip_special_tokens = true

[rollout]
num_rollout = {batches}
rollout_batch_size = 32
n_samples_per_prompt = 8

[reward]
override_environments = true

[plugins]
reward = "adaptive:right"

[train]
threads = 1
eval_interval = {interval}
checkpoint_interval = {batches}
{more}
[eval]
num_prompts = 40
n_samples_per_prompt = 1
rm_type = "exact"
"""
ENVIRONMENT = """id = "core/reverse_text"
level = {level}
apply_chat_template = false
parameters = {{ style = "compact", alphabet_size = 5 }}
"""
ADAPTIVE = """
[prompts.adaptive]
environment_list = ["core/reverse_text"]
apply_chat_template = false
parameters = {{ "core/reverse_text" = {{ style = "compact", alphabet_size = 5 }} }}
policy = "{policy}"
initial_difficulty = {level}
difficulty_sliding_window_size = {window}
"""
ROWS = """
[prompts]
rollout_shuffle = true
[[prompts.datasets]]
path = "rows.jsonl"
label_key = "label"
apply_chat_template = false
adaptive = {adaptive}
"""
TINY = """
[model]
checkpoint = "tiny"
[model.tiny]
characters = "abcderv:="
"""
WARM_UP = """
[train.warm_up]
stop_accuracy = {stop}
wrong_share = 0.5
probe_interval = 50
"""
OPTIMIZER = """
[train.optimizer]
learning_rate = 3e-4
warmup_updates = 5
"""


async def right(sample: Sample, prompt: Prompt) -> Verdict:
    """Give 1 for the label and 0 for all else: shaped rewards differ within a group of which all answers are wrong."""
    return Verdict.graded(sample.response.partition("\n")[0] == prompt.label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--batches", type=int, default=80)
    parser.add_argument("--warm-up", type=float, default=0.2, help="accuracy over all levels that it ends at")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, a core each")
    parser.add_argument("--folder", type=Path, help="keep the runs there (default: a temporary folder)")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(arguments.folder or Path(temporary), batches=arguments.batches)
        bench.make_model(arguments.warm_up)
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": machine(),
            "batches": arguments.batches,
            "start": bench.accuracy_of_start(),
            **bench.compare_all(arguments.seeds, arguments.parallel),
        }
    record["seconds"] = round(time.monotonic() - began, 1)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


class Bench:
    """Runs in a folder, and what came of them."""

    def __init__(self, folder: Path, *, batches: int) -> None:
        self.folder = folder.resolve()
        self.batches = batches
        self.folder.mkdir(parents=True, exist_ok=True)
        self.runs: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def make_model(self, stop: float) -> None:
        """Teach the model that all arms begin with, one seed whatever theirs are."""
        evaluated = "".join(f"\n[[eval.environments]]\n{ENVIRONMENT.format(level=level)}" for level in LEVELS)
        prompts = ADAPTIVE.format(policy="fixed", level=max(TAUGHT_LEVELS), window=len(TAUGHT_LEVELS))
        common = COMMON.format(batches=1, interval=1, more=WARM_UP.format(stop=stop))
        self._write("base", TINY + prompts + common + evaluated)
        self._run("base", self.folder / "base", seed=0)
        model = f'\n[model]\ncheckpoint = "{self.folder / "base" / "model"}"\n'
        common = model + COMMON.format(batches=self.batches, interval=max(1, self.batches // 10), more=OPTIMIZER)
        for name, policy, level, window in (
            ("band", "band", 0, 4),
            ("mixed", "fixed", max(LEVELS), len(LEVELS)),
            *((f"level-{level}", "fixed", level, 1) for level in SINGLE_LEVELS),
        ):
            self._write(name, ADAPTIVE.format(policy=policy, level=level, window=window) + common + evaluated)
        for name, adaptive in (("rows-adaptive", "true"), ("rows-plain", "false")):
            self._write(name, ROWS.format(adaptive=adaptive) + common + evaluated)
        self._write_rows()

    def accuracy_of_start(self) -> dict[str, float]:
        """Return the accuracy of the model that all arms begin with, by level."""
        record = _records(self.folder / "base" / "eval.jsonl")[0]
        return {name: found["accuracy"] for name, found in record["sets"].items()}

    def compare_all(self, seeds: Sequence[int], parallel: int) -> dict[str, Any]:
        """Train all arms and return what they came to."""
        search = [(f"level-{level}", SEARCH_SEED) for level in SINGLE_LEVELS]
        self._run_all(search, parallel)
        at_search = self._at_equal_tokens([name for name, _ in search], [SEARCH_SEED])
        best = max(at_search, key=lambda name: at_search[name]["accuracy"]["values"][0])
        of_levels, of_rows = ("band", "mixed", best), ("rows-adaptive", "rows-plain")
        self._run_all([(name, seed) for seed in seeds for name in (*of_levels, *of_rows)], parallel)
        found = {"single_levels": at_search, "best_single_level": best}
        for key, arms in (("environments", of_levels), ("rows", of_rows)):
            arms_found = self._at_equal_tokens(arms, seeds)
            beside = {name: _beside(arms_found[arms[0]], arms_found[name]) for name in arms[1:]}
            found[key] = {"arms": arms_found, f"{arms[0]}_beside": beside}
            print(json.dumps(found[key]["arms"]), json.dumps(beside), flush=True)
        return found

    def _at_equal_tokens(self, arms: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
        found: dict[str, Any] = {name: {"spread": [], "accuracy": [], "level": []} for name in arms}
        for seed in seeds:
            tokens = min(self.runs[name, seed][-1]["tokens"] for name in arms)
            for name in arms:
                run = self.runs[name, seed]
                until = [each for each in run if each["tokens"] <= tokens]
                found[name]["spread"].append(statistics.fmean(each["spread"] for each in until))
                found[name]["accuracy"].append(_accuracy_at(run, tokens))
                found[name]["level"].append(until[-1]["level"])
        return {
            name: {
                "spread": _mean(each["spread"]),
                "accuracy": _mean(each["accuracy"]),
                "mean_level_at_the_end": statistics.fmean(each["level"]),
            }
            for name, each in found.items()
        }

    def _run_all(self, wanted: Sequence[tuple[str, int]], parallel: int) -> None:
        def run(name: str, seed: int) -> None:
            out = self.folder / f"{name}-{seed}"
            began = time.monotonic()
            self._run(name, out, seed=seed)
            self.runs[name, seed] = found = _steps(out)
            last = {key: round(value, 3) for key, value in found[-1].items() if value is not None}
            print(
                json.dumps({"arm": name, "seed": seed, "seconds": round(time.monotonic() - began, 1), **last}),
                flush=True,
            )

        with ThreadPoolExecutor(parallel) as pool:
            for each in [pool.submit(run, name, seed) for name, seed in wanted]:
                each.result()

    def _run(self, name: str, out: Path, *, seed: int) -> None:
        command = [sys.executable, "-m", "rollfeed", "train", str(self.folder / f"{name}.toml"), "--out", str(out)]
        command += ["--quiet", "--set", f"seed={seed}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, check=False)
        if done.returncode:
            raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")

    def _write(self, name: str, settings: str) -> None:
        (self.folder / f"{name}.toml").write_text(settings, encoding="utf-8")

    def _write_rows(self) -> None:
        chosen, plan = ChosenEnvironment("core/reverse_text", PARAMETERS), MakingPlan.alone(folders=[])
        with (self.folder / "rows.jsonl").open("w", encoding="utf-8") as file:
            for level in LEVELS:
                indices = range(NUM_ROWS // len(LEVELS))
                for task in sample_tasks(chosen, plan, level=level, indices=indices, seed=7):
                    file.write(json.dumps({"prompt": task.question, "label": task.answer}) + "\n")


def _steps(out: Path) -> list[dict[str, Any]]:
    """Return what each batch of a run came to: tokens so far, groups with spread, accuracy if evaluated after it."""
    accuracies = {
        record["step"]: statistics.fmean(found["accuracy"] for found in record["sets"].values())
        for record in _records(out / "eval.jsonl")
    }
    tokens, steps = 0.0, []
    with RunReader(out) as reader:
        for record in reader.steps():
            groups = reader.summaries(record.step)
            rights = [[member.correct is Correct.YES for member in group.members] for group in groups]
            words = [group.prompt.partition(":")[2].partition("=")[0] for group in groups]
            tokens += record.metrics["rollout/generated_tokens"]
            steps.append(
                {
                    "tokens": tokens,
                    "spread": statistics.fmean(any(each) and not all(each) for each in rights),
                    "level": statistics.fmean(len(word) - 2 for word in words),
                    "accuracy": accuracies.get(record.step + 1),
                }
            )
    steps[0]["start"] = accuracies[0]
    return steps


def _accuracy_at(run: Sequence[dict[str, Any]], tokens: float) -> float:
    """Return the accuracy at so many tokens, on the line between the evaluations before and after."""
    points = [
        (0.0, run[0]["start"]),
        *((each["tokens"], each["accuracy"]) for each in run if each["accuracy"] is not None),
    ]
    for (before, low), (after, high) in pairwise(points):
        if tokens <= after:
            return low + (high - low) * (tokens - before) / (after - before)
    return points[-1][1]


def _beside(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    pairs = {key: list(zip(ours[key]["values"], other[key]["values"], strict=True)) for key in ("spread", "accuracy")}
    return {
        "spread_ratio": _mean([a / b for a, b in pairs["spread"]]) if all(b for _, b in pairs["spread"]) else None,
        "accuracy_difference": _mean([a - b for a, b in pairs["accuracy"]]),
    }


def _mean(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean with its 95 % interval, and the values."""
    mean, free = statistics.fmean(values), len(values) - 1
    half = STUDENT_95.get(free, 2.0) * statistics.stdev(values) / math.sqrt(len(values)) if free else math.nan
    interval = [round(mean - half, 4), round(mean + half, 4)] if free else None
    return {"mean": round(mean, 4), "interval": interval, "values": [round(value, 4) for value in values]}


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
