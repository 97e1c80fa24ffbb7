"""Learning to name colours from nothing but rewards: two seeds, and a control that sees noise.

Every run is the command of examples/pictures, started as a process; its time is that of the whole process. The control
is the same command with noise in place of the pictures: it can learn the words and to answer with one, and one of three
is right a third of the time. The lower end of the last accuracy's 95 % interval must be above a third in the runs, and
must not be in the control.

::

    python bench/pictures.py --output bench/pictures.json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training_runs import records, seeds_and_a_control, tell, train

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "examples" / "pictures" / "train.toml"
NOISE = "noise_colour.py:NoiseColour"  # commands of training_runs are run in its folder
CONTROL = (f"prompts.environments.0.id={NOISE}", f"eval.environments.0.id={NOISE}")
GUESSING = 1 / 3


def main() -> None:
    seeds_and_a_control(__doc__, of_seed, CONTROL, settings=SETTINGS, sign="sees", guessing_a_colour=GUESSING)


def of_seed(seed: int, out: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run the command; return its curve, and whether it ends above what guessing a colour comes to."""
    run = train(SETTINGS, out, seed=seed, overrides=overrides)
    mismatch = max(step["train/picture_mismatch_kl"] for step in records(out / "train.jsonl"))
    found = {**run, "largest_picture_mismatch_kl": mismatch, "sees": run["curve"][-1]["accuracy_low"] > GUESSING}
    tell(found)
    return found


if __name__ == "__main__":
    main()
