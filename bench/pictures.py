"""Learning to name colours from nothing but rewards, and to count dots: two seeds each, and a control that sees noise.

Every run is the command of examples/pictures, started as a process; its time is that of the whole process. The control
is the same command with noise in place of the pictures: it can learn the words and to answer with one, and guesses
then; its warm-up ends at what guessing reaches. The lower end of the last accuracy's 95 % interval must be above
guessing in the runs, and must not be in the control. A task that is not measured keeps what the file says of it.

::

    python bench/pictures.py --output bench/pictures.json
    python bench/pictures.py --output bench/pictures.json --tasks core/count_dots
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from training_runs import arguments_of, measured, records, tell, train

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "pictures"


class _Task(NamedTuple):
    settings: Path
    control: tuple[str, ...]
    guessing: float


def _noise(name: str) -> tuple[str, ...]:
    """Return overrides; commands of training_runs are run in the folder of what they name."""
    where = f"noise_pictures.py:{name}"
    return (f"prompts.environments.0.id={where}", f"eval.environments.0.id={where}")


TASKS = {
    "core/name_colour": _Task(EXAMPLES / "train.toml", _noise("NoiseColour"), 1 / 3),
    "core/count_dots": _Task(EXAMPLES / "count.toml", (*_noise("NoiseDots"), "train.warm_up.stop_accuracy=0.2"), 1 / 4),
}


def main() -> None:
    arguments = arguments_of(__doc__, tasks=list(TASKS))
    path: Path = arguments.output
    found = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.tasks:
        task = TASKS[name]
        found[name] = measured(
            arguments.seeds,
            partial(of_seed, task),
            task.control,
            settings=task.settings,
            sign="sees",
            guessing=task.guessing,
        )
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def of_seed(task: _Task, seed: int, out: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run the command; return its curve, and whether it ends above what guessing comes to."""
    run = train(task.settings, out, seed=seed, overrides=overrides)
    mismatch = max(step["train/picture_mismatch_kl"] for step in records(out / "train.jsonl"))
    sees = run["curve"][-1]["accuracy_low"] > task.guessing
    found = {**run, "largest_picture_mismatch_kl": mismatch, "sees": sees}
    tell(found)
    return found


if __name__ == "__main__":
    main()
