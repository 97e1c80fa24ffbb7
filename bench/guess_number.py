"""Learning to find a number in several turns: two seeds, and a control.

Every run is the command of examples/guess-number, started as a process; its time is that of the whole process. Settings
were tried on seed 0 and on no other. The control trains on advantages that are handed out at random within each group:
its last accuracy must not be above its first one by more than chance, which is the 95 % interval of the difference of
two shares of 512 episodes.

Beside it stands what guesses come to that heed nothing of what is told, each number as likely as the others, and that
always find the number: those that halve what is left.

::

    python bench/guess_number.py --output bench/guess_number.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from training_runs import tell, train

from rollfeed.benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "examples" / "guess-number" / "train.toml"
CONTROL = ("plugins.advantage=shuffled_rewards:shuffled_advantages",)
HIGHEST, MAX_TURNS, NUM_EPISODES = 4, 3, 512


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
        "guessing_at_random": 1.0 - (1.0 - 1.0 / HIGHEST) ** MAX_TURNS,
        "runs": runs,
        "control": control,
        "met": all(run["improves"] for run in runs) and not control["improves"],
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def of_seed(seed: int, out: Path, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run the command; return its curve, and whether its end is above its beginning by more than chance."""
    run = train(SETTINGS, out, seed=seed, overrides=overrides)
    first, last = (run["curve"][place]["accuracy"] for place in (0, -1))
    deviation = math.sqrt((first * (1.0 - first) + last * (1.0 - last)) / NUM_EPISODES)
    found = {**run, "improves": last - first > 1.96 * deviation}
    tell(found)
    return found


if __name__ == "__main__":
    main()
