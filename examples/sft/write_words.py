"""Write the words that the warm-up of `examples/reverse` is taught, a row each, in its order and with right answers.

    python examples/sft/write_words.py examples/sft/words.jsonl

Usage: write_words.py FILE [SEED [ROWS]]
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import rollfeed
from rollfeed.app.training import prepare_warm_up

SETTINGS = Path(__file__).parents[1] / "reverse" / "train.toml"


def write(path: Path, *, seed: int = 0, num_rows: int = 19_200) -> None:
    """Write the first words of the warm-up under a seed."""
    prepared = rollfeed.prepare(rollfeed.RunSpec.load(SETTINGS, [f"seed={seed}"]))
    warm_up = asyncio.run(prepare_warm_up(prepared))
    assert warm_up is not None
    prompts = asyncio.run(warm_up.source.draw(num_rows))
    rows = [{"prompt": prompt.text, "label": prompt.label} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), **dict(zip(("seed", "num_rows"), map(int, sys.argv[2:]), strict=False)))
