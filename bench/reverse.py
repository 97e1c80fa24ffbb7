"""Learning to reverse words of four symbols: five seeds, a control, and what supervision alone would reach.

Every run is the command of examples/reverse, started as a process; its time is that of the whole process, with the
model that it makes and the warm-up. Settings were tried on seeds 0 to 5 and on no other. Beside it:

- the control trains on shuffled rewards: its last accuracy must be within the 95 % interval of its first one;
- the warm-up is continued without wrong labels, on as many labels as the seed's reinforcement learning had answers,
  from the same sources, and measured on the same held-out words;
- the words of the warm-up, of training and of the evaluation are counted, and compared.

With ``--busy`` the machine did other work at the same time: seconds are of that, and no goal.

::

    python bench/reverse.py --output bench/reverse.json --picture bench/reverse.png
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
from matplotlib.figure import Figure
from training_runs import records, tell, train

from rollfeed import app
from rollfeed.app import prepare_run_evaluation
from rollfeed.app.training import make_trainer
from rollfeed.app.training.warm_up import demonstrations_of, prepare_warm_up
from rollfeed.benchmarks.machine import machine
from rollfeed.config import RunSpec
from rollfeed.types import TensorUpdate

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "examples" / "reverse" / "train.toml"
TUNED_SEEDS, FRESH_SEEDS = (0, 1, 2, 3, 4, 5), (7, 11)
CONTROL = (
    "plugins.group_reward=shuffled_rewards:shuffled",
    "reward.override_environments=true",
    "eval.rm_type=environment",
)
GOAL_ACCURACY, GOAL_START, GOAL_SECONDS = 0.80, 0.35, 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--picture", type=Path, help="draw all curves there")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, *FRESH_SEEDS])
    parser.add_argument("--busy", action="store_true", help="the machine does other work, so that no time is a goal")
    parser.add_argument("--folder", type=Path, help="keep the runs there (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        busy = arguments.busy
        runs = [of_seed(seed, folder / f"seed-{seed}", busy=busy) for seed in arguments.seeds]
        first = arguments.seeds[0]
        control = of_seed(first, folder / "control", CONTROL, busy=busy)
        continued = asyncio.run(continue_warm_up(first, folder / f"seed-{first}"))
        tell(continued)
        words = compare_words(first, folder / f"seed-{first}")
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "busy": busy,
        "settings": SETTINGS.read_text(encoding="utf-8"),
        "goal": {"accuracy": GOAL_ACCURACY, "from_below": GOAL_START, "seconds": GOAL_SECONDS},
        "all_met": all(run["met"] for run in runs),
        "runs": runs,
        "control": {**control, "ends_within_interval_of_start": is_within(control["curve"])},
        "continued_warm_up": continued,
        "words": words,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if arguments.picture is not None:
        draw(record, arguments.picture)


def of_seed(seed: int, out: Path, overrides: tuple[str, ...] = (), *, busy: bool) -> dict[str, Any]:
    """Run the command; return its curve and what it took."""
    run = train(SETTINGS, out, seed=seed, overrides=overrides)
    last, curve = records(out / "warm-up.jsonl")[-1], run["curve"]
    reached = curve[-1]["accuracy"] >= GOAL_ACCURACY and curve[0]["accuracy"] < GOAL_START
    found = {
        **run,
        "tuned_on": seed in TUNED_SEEDS,
        "met": reached and (busy or run["seconds"] < GOAL_SECONDS),
        "warm_up": {"updates": last["updates"], "accuracy": last["accuracy"]},
    }
    tell(found)
    return found


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the held-out accuracy of all runs, with 95 % intervals, and of the control."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run in record["runs"]:
        add_curve(axes, run["curve"], color="#1f6fb4", label=None if axes.lines else "five seeds")
    add_curve(axes, record["control"]["curve"], color="#777777", label="rewards shuffled")
    axes.set(xlabel="batches trained on", ylabel="held-out accuracy", ylim=(0.0, 1.0))
    axes.grid(alpha=0.3)
    axes.legend(loc="center right", frameon=False)
    figure.savefig(path, dpi=120)


def add_curve(axes: Any, curve: list[dict[str, float]], *, color: str, label: str | None) -> None:
    batches, values, lows, highs = zip(
        *((point["batches"], point["accuracy"], point["accuracy_low"], point["accuracy_high"]) for point in curve),
        strict=True,
    )
    axes.fill_between(batches, lows, highs, color=color, alpha=0.12, linewidth=0)
    axes.plot(batches, values, color=color, label=label)


def is_within(curve: list[dict[str, float]]) -> bool:
    return curve[0]["accuracy_low"] <= curve[-1]["accuracy"] <= curve[0]["accuracy_high"]


def spec_of(seed: int) -> RunSpec:
    return RunSpec.load(SETTINGS, [f"seed={seed}"])


async def continue_warm_up(seed: int, out: Path) -> dict[str, Any]:
    """Go on from the state after the warm-up with right labels only."""
    from rollfeed.training.supervised import SupervisedUpdates

    prepared = app.prepare(spec_of(seed))
    warm_up = await prepare_warm_up(prepared)
    assert warm_up is not None
    evaluation, trainer = prepare_run_evaluation(prepared.spec, prepared.model), make_trainer(prepared)
    assert evaluation is not None
    trainer.load(out / "checkpoints" / "warm-up")
    updates = SupervisedUpdates(
        trainer.policy,
        learning_rate=warm_up.settings.learning_rate,
        micro_batch_tokens=prepared.settings.train.micro_batch_tokens,
    )
    rollout, batch_size = prepared.settings.rollout, warm_up.settings.batch_size
    num_updates = rollout.num_rollout * rollout.rollout_batch_size * rollout.n_samples_per_prompt // batch_size
    random = Random(seed)
    for _ in range(num_updates):
        prompts = await warm_up.source.draw(batch_size)
        demonstrations = demonstrations_of(prompts, tokenizer=prepared.model.tokenizer, wrong_share=0.0, random=random)
        await asyncio.to_thread(updates.update, demonstrations)
    async with prepared.engine:
        await prepared.engine.apply(TensorUpdate(trainer.weights(), policy_version=1))
        found = (await app.evaluate(evaluation, engine=prepared.engine)).sets[0]
    return {
        "seed": seed,
        "updates": num_updates,
        "labels_seen": num_updates * batch_size,
        "accuracy": found.accuracy,
        "accuracy_low": found.accuracy_interval.low,
        "accuracy_high": found.accuracy_interval.high,
    }


def compare_words(seed: int, out: Path) -> dict[str, Any]:
    """Return how many words the warm-up, training and the evaluation have, and how many of the last came up before."""
    prepared = app.prepare(spec_of(seed))
    updates = records(out / "warm-up.jsonl")[-1]["updates"]

    async def of_warm_up() -> set[str]:
        warm_up = await prepare_warm_up(prepared)
        assert warm_up is not None
        drawn = await warm_up.source.draw(updates * warm_up.settings.batch_size)
        probed = [prompt for each in warm_up.evaluation.sets for prompt in each.prompts]
        return {str(prompt.metadata["params"]["text"]) for prompt in (*drawn, *probed)}

    warm_up = asyncio.run(of_warm_up())
    trained = {
        text.removeprefix("rev:").removesuffix("=")
        for path in sorted((out / "batches").glob("*.parquet"))
        for text in pq.read_table(path).column("prompt").to_pylist()
    }
    evaluation = prepare_run_evaluation(prepared.spec, prepared.model)
    assert evaluation is not None
    held_out = {str(prompt.metadata["params"]["text"]) for each in evaluation.sets for prompt in each.prompts}
    return {
        "warm_up": len(warm_up),
        "trained": len(trained),
        "held_out": len(held_out),
        "held_out_in_warm_up": len(held_out & warm_up),
        "held_out_in_training": len(held_out & trained),
    }


if __name__ == "__main__":
    main()
