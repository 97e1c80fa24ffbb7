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

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training_runs import seeds_and_a_control, tell, train

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "examples" / "guess-number" / "train.toml"
CONTROL = ("plugins.advantage=shuffled_rewards:shuffled_advantages",)
HIGHEST, MAX_TURNS, NUM_EPISODES = 4, 3, 512


def main() -> None:
    seeds_and_a_control(
        __doc__,
        of_seed,
        CONTROL,
        settings=SETTINGS,
        sign="improves",
        guessing_at_random=1.0 - (1.0 - 1.0 / HIGHEST) ** MAX_TURNS,
    )


def of_seed(seed: int, out: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run the command; return its curve, and whether its end is above its beginning by more than chance."""
    run = train(SETTINGS, out, seed=seed, overrides=overrides)
    first, last = (run["curve"][place]["accuracy"] for place in (0, -1))
    deviation = math.sqrt((first * (1.0 - first) + last * (1.0 - last)) / NUM_EPISODES)
    found = {**run, "improves": last - first > 1.96 * deviation}
    tell(found)
    return found


if __name__ == "__main__":
    main()
