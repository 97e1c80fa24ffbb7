"""SmolLM2-135M on a built-in environment: how the environment is chosen, and the curve of two seeds.

The rule: of each built-in environment, the lowest level of which the model solves 5 to 60 % (``bench/gpu/calibrate.py``
measured all) and of whose held-out problems none comes up in training; of these levels, the one that is solved most
often. Runs are those of examples/smollm2.

::

    python bench/smollm2.py --output bench/smollm2.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from training_runs import tell, train

from rollfeed.app.calibration import HIGHEST_ACCURACY, LOWEST_ACCURACY
from rollfeed.cli.benching.machine import machine
from rollfeed.config import Settings, load_settings
from rollfeed.environments import EnvironmentRegistry
from rollfeed.environments.tasks import make_task

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "examples" / "smollm2" / "train.toml"
CALIBRATION = ROOT / "bench" / "gpu" / "calibration.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    settings = load_settings(SETTINGS, [])
    levels = [with_overlap(level, settings) for level in json.loads(CALIBRATION.read_text())["levels"]]
    chosen = choose(levels)
    (used,) = settings.prompts.environments
    if (used.id, used.level) != (chosen["environment"], chosen["level"]):
        raise SystemExit(f"the rule chooses {chosen['environment']}@{chosen['level']}, not {used.id}@{used.level}")
    runs = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in arguments.seeds:
            runs.append(train(SETTINGS, Path(temporary) / f"seed-{seed}", seed=seed))
            tell(runs[-1])
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "settings": SETTINGS.read_text(encoding="utf-8"),
        "chosen": chosen,
        "levels": levels,
        "runs": runs,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def with_overlap(level: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Add the share of held-out problems that come up in training, word for word."""
    environment = EnvironmentRegistry().get(level["environment"])
    num_trained = settings.rollout.num_rollout * settings.rollout.rollout_batch_size

    def questions(count: int, split: str, seed: int) -> list[str]:
        return [
            make_task(environment, level=level["level"], index=index, run_seed=seed, split=split).question
            for index in range(count)
        ]

    trained = set(questions(num_trained, "train", settings.seed))
    held_out = questions(settings.eval.num_prompts or 100, "eval", settings.eval.seed)
    return {**level, "known_share": sum(question in trained for question in held_out) / len(held_out)}


def choose(levels: list[dict[str, Any]]) -> dict[str, Any]:
    lowest: dict[str, dict[str, Any]] = {}
    for level in levels:
        is_learnable = LOWEST_ACCURACY <= level["accuracy"] <= HIGHEST_ACCURACY
        if is_learnable and level["known_share"] == 0.0:
            lowest.setdefault(level["environment"], level)
    return max(lowest.values(), key=lambda level: level["accuracy"])


if __name__ == "__main__":
    main()
