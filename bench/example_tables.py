"""Write what the two examples came to into docs/training.md, from bench/reverse.json and bench/smollm2.json.

What is between ``<!-- NAME -->`` and ``<!-- /NAME -->`` is written anew.

::

    python bench/example_tables.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "training.md"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in (("reverse", reverse_lines), ("smollm2", smollm2_lines)):
        record = json.loads((ROOT / "bench" / f"{name}.json").read_text(encoding="utf-8"))
        written = "\n".join(lines(record))
        place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
        text, count = place.subn(lambda _, new=written: f"{new}\n", text)
        if count != 1:
            raise SystemExit(f"{PAGE}: has {count} places for {name}")
    PAGE.write_text(text, encoding="utf-8")


def reverse_lines(record: dict[str, Any]) -> Iterator[str]:
    batches = record["runs"][0]["curve"][-1]["batches"]
    yield f"| seed | warm-up | held-out accuracy before | after {batches} batches | change, over the same words |"
    yield "|---|---|---|---|---|"
    for run in (*record["runs"], record["control"]):
        is_control = run is record["control"]
        seed = f"{run['seed']}, rewards shuffled" if is_control else str(run["seed"])
        seed += "" if run["tuned_on"] else ", not tuned on"
        first, last = run["curve"][0], run["curve"][-1]
        warm_up = "the same" if is_control else f"{run['warm_up']['updates']:,} updates"
        yield f"| {seed} | {warm_up} | {share(first)} | {share(last)} | {change(run['change'])} |"
    words, more = record["words"], record["continued_warm_up"]
    yield ""
    yield "![Curves of the five seeds and of the control](../bench/reverse.png)"
    yield ""
    yield (
        f"The warm-up of the first seed drew {words['warm_up']:,} different words, training {words['trained']:,}; of "
        f"the {words['held_out']} of the evaluation, all different, {words['held_out_in_warm_up']} are among the "
        f"former and {words['held_out_in_training']} among the latter. The task is easy for supervision: the warm-up "
        "continued with right labels only, on as many labels as reinforcement learning had answers "
        f"({more['labels_seen']:,}), reaches {more['accuracy']:.3f}. What the example shows is that rewards alone "
        "teach it too."
    )
    yield f"{timing(record)} Everything is in [bench/reverse.json](../bench/reverse.json)."


def smollm2_lines(record: dict[str, Any]) -> Iterator[str]:
    curve = record["runs"][0]["curve"]
    between = " | ".join(f"after {point['batches']}" for point in curve[1:])
    yield f"| seed | held-out accuracy before | {between} | change, over the same problems | tokens a response |"
    yield "|---" * (len(curve) + 3) + "|"
    for run in record["runs"]:
        first, *middle, last = run["curve"]
        cells = [share(first), *(f"{point['accuracy']:.3f}" for point in middle), share(last), change(run["change"])]
        tokens = f"{first['response_length_mean']:.0f} -> {last['response_length_mean']:.0f}"
        yield f"| {run['seed']} | {' | '.join(cells)} | {tokens} |"
    chosen = record["chosen"]
    small = [level for level in record["levels"] if 0.05 <= level["accuracy"] <= 0.60 and not level["is_enough"]]
    names = [f"`{level['environment']}` at level {level['level']} ({level['num_held_out']})" for level in small]
    left_out = ", ".join(names)
    yield ""
    yield (
        f"Each evaluation asks {record['runs'][0]['num_prompts']} different problems, of which training draws "
        f"{chosen['known_share']:.0%}. The rule chose `{chosen['environment']}` at level {chosen['level']}, of which "
        f"the model solves {chosen['accuracy']:.0%}; it leaves out levels with fewer held-out problems: {left_out}."
    )
    yield f"{timing(record)} Everything is in [bench/smollm2.json](../bench/smollm2.json)."


def share(point: dict[str, Any]) -> str:
    return f"{point['accuracy']:.3f} ({point['accuracy_low']:.3f} to {point['accuracy_high']:.3f})"


def change(found: dict[str, Any]) -> str:
    return f"{found['accuracy']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})"


def timing(record: dict[str, Any]) -> str:
    if record["busy"]:
        return "The machine did other work meanwhile, so that the seconds in the file are not those of the example."
    return f"A run took {', '.join(str(round(run['seconds'])) for run in record['runs'])} s on this machine."


if __name__ == "__main__":
    main()
