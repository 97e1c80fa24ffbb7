"""Learning to name colours from nothing but rewards: two seeds, and a control that sees noise.

Every run is the command of examples/pictures, started as a process; its time is that of the whole process. The control
is the same command with noise in place of the pictures: it can learn the words and to answer with one, and one of three
is right a third of the time. The lower end of the last accuracy's 95 % interval must be above a third in the runs, and
must not be in the control.

::

    python bench/pictures.py --output bench/pictures.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from training_runs import records, tell, train

from rollfeed.benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "examples" / "pictures" / "train.toml"
NOISE = "noise_colour.py:NoiseColour"  # commands of training_runs are run in its folder
CONTROL = (f"prompts.environments.0.id={NOISE}", f"eval.environments.0.id={NOISE}")
GUESSING = 1 / 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        runs = [of_seed(seed, Path(temporary, f"seed-{seed}")) for seed in arguments.seeds]
        control = of_seed(arguments.seeds[0], Path(temporary, "control"), CONTROL)
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine() | {"load_average_before": load_before},
        "settings": SETTINGS.read_text(encoding="utf-8"),
        "guessing_a_colour": GUESSING,
        "runs": runs,
        "control": control,
        "met": all(run["sees"] for run in runs) and not control["sees"],
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def of_seed(seed: int, out: Path, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run the command; return its curve, and whether it ends above what guessing a colour comes to."""
    run = train(SETTINGS, out, seed=seed, overrides=overrides)
    mismatch = max(step["train/picture_mismatch_kl"] for step in records(out / "train.jsonl"))
    found = {**run, "largest_picture_mismatch_kl": mismatch, "sees": run["curve"][-1]["accuracy_low"] > GUESSING}
    tell(found)
    return found


if __name__ == "__main__":
    main()
