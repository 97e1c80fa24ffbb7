"""SmolLM2-135M on a built-in environment: how the environment is chosen, and the curve of two seeds.

The rule: of each built-in environment, the lowest level of which the model solves 5 to 60 % (``bench/gpu/calibrate.py``
measured all) and which has as many held-out problems as the evaluation asks; of these levels, the one that is solved
most often. Runs are those of examples/smollm2. With ``--busy`` the machine did other work at the same time, and seconds
are of that.

::

    python bench/smollm2.py --output bench/smollm2.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from training_runs import tell, train

from rollfeed import app
from rollfeed.benchmarks.machine import machine
from rollfeed.config import RunSpec, Settings
from rollfeed.environments import EnvironmentRegistry, EnvironmentSource
from rollfeed.evaluation.calibration import HIGHEST_ACCURACY, LOWEST_ACCURACY
from rollfeed.prompts import ChatRenderer
from rollfeed.protocols import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "examples" / "smollm2" / "train.toml"
CALIBRATION = ROOT / "bench" / "gpu" / "calibration.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="as for rollfeed train")
    parser.add_argument("--busy", action="store_true", help="the machine does other work")
    arguments = parser.parse_args()
    settings = RunSpec.load(SETTINGS).settings
    tokenizer = app.load_settings_model(settings).tokenizer
    levels = [with_problems(level, settings, tokenizer) for level in json.loads(CALIBRATION.read_text())["levels"]]
    chosen = choose(levels)
    (used,) = settings.prompts.environments
    if (used.id, used.level) != (chosen["environment"], chosen["level"]):
        raise SystemExit(f"the rule chooses {chosen['environment']}@{chosen['level']}, not {used.id}@{used.level}")
    runs = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in arguments.seeds:
            runs.append(train(SETTINGS, Path(temporary) / f"seed-{seed}", seed=seed, overrides=arguments.overrides))
            tell(runs[-1])
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "busy": arguments.busy,
        "settings": SETTINGS.read_text(encoding="utf-8"),
        "chosen": chosen,
        "levels": levels,
        "runs": runs,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def with_problems(level: dict[str, Any], settings: Settings, tokenizer: Tokenizer) -> dict[str, Any]:
    """Add how many different problems the evaluation would have, and the share of them that training draws."""

    def source(split: str, seed: int) -> EnvironmentSource:
        environment = EnvironmentRegistry().get(level["environment"])
        renderer = ChatRenderer(tokenizer, rollout_max_prompt_len=None)
        return EnvironmentSource(environment, level=level["level"], seed=seed, renderer=renderer, split=split)

    num_trained = settings.rollout.num_rollout * settings.rollout.rollout_batch_size
    trained = {prompt.text for prompt in asyncio.run(source("train", settings.seed).draw(num_trained))}
    held_out = asyncio.run(source("eval", settings.eval.seed).draw_different(settings.eval.num_prompts or 100))
    known_share = sum(prompt.text in trained for prompt in held_out) / len(held_out)
    is_enough = len(held_out) == settings.eval.num_prompts
    return {**level, "num_held_out": len(held_out), "is_enough": is_enough, "known_share": known_share}


def choose(levels: list[dict[str, Any]]) -> dict[str, Any]:
    lowest: dict[str, dict[str, Any]] = {}
    for level in levels:
        if LOWEST_ACCURACY <= level["accuracy"] <= HIGHEST_ACCURACY and level["is_enough"]:
            lowest.setdefault(level["environment"], level)
    return max(lowest.values(), key=lambda level: level["accuracy"])


if __name__ == "__main__":
    main()
