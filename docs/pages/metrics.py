"""docs/metrics.md, made from what stands beside each metric where it is made.

A comment ``#: part/name: description`` in the package describes a metric, or several with commas between their names;
``<reason>`` in a name stands for whatever the run has there. Counts of the ledger and of engines are fields of their
classes, with what is said of them there.

    python docs/pages/metrics.py > docs/metrics.md
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import rollfeed

_PACKAGE = Path(rollfeed.__file__).parent
_BESIDE = re.compile(r"^ *#: ((?:[a-zA-Z]+/\S+, )*[a-zA-Z]+/\S+): (.+)$", re.MULTILINE)
_COUNTS = (("ledger", "types/run.py", "LedgerCounts"), ("engine", "engine/**/counters.py", "Counters"))
_PARTS = {
    "rollout": "Batches: their rewards, lengths, drops and waste. A line a step in metrics.jsonl, as all that follow.",
    "environments": "Problems of environments that could not be made or used, since the run began.",
    "datasets": "Data sets whose rows are asked by what became of their answers; see [adaptive.md](adaptive.md).",
    "sources": "Data sets and environments, each by the groups that the batch has of it.",
    "reward": "Whether rewards still mean what they should; see [reward-models.md](reward-models.md).",
    "judge": "Judges of answers, all together, in the step; see [judges.md](judges.md). None where none was asked.",
    "time": "Times: when, for how long, and what with; each moment counts once. They differ from run to run, too.",
    "perf": "Times and rates; they differ from run to run.",
    "ledger": "Where all prompts drawn so far are at the end of the step.",
    "engine": "The engine: totals since the run was started, and what is so at the end of the step.",
    "weights": "The proof that the engine has the weights that it was given; see [weights.md](weights.md).",
    "RLVE": "Environments whose difficulty adapts; see [adaptive.md](adaptive.md).",
    "train": "Updates. A line a batch in train.jsonl; means over trained tokens, where nothing else is said.",
    "eval": "Evaluations, as trackers get them; eval.jsonl has the same numbers by set.",
}


_HEAD = """# Metrics

A run writes a line of numbers a batch to `metrics.jsonl` in its directory, a training besides to `train.jsonl`, and
evaluations to `eval.jsonl`; `pandas.read_json("runs/words/metrics.jsonl", lines=True)` reads one. Five to watch:

| name | as it should be | otherwise |
|---|---|---|
"""
_WATCHED = (
    (
        "rollout/reward_mean",
        "rises over tens of batches, and goes up and down in between",
        "flat: look at the next one, then at the learning rate",
    ),
    (
        "rollout/group_reward_std",
        "above 0: a group teaches by the differences between its answers",
        "near 0: prompts are too hard or too easy, or the grader misses answers",
    ),
    (
        "rollout/truncated_ratio",
        "near 0",
        "half of the answers are cut off, and scored without their end: `sampling.rollout_max_response_len`",
    ),
    (
        "train/mismatch_kl",
        "below 0.01 nats a token",
        "above 0.1: what is trained is not what was sampled; see [weights.md](weights.md)",
    ),
    (
        "train/entropy",
        "falls slowly",
        "near 0 while answers are wrong: the policy has stopped trying others; `train.loss.clip_high`",
    ),
)
_FOOT = """
[Advice](runs.md#advice) that `rollfeed show` gives is made of these and others, with the thresholds there.

All that follows is made by `python docs/pages/metrics.py` from the code.
"""


_PROMETHEUS = """\
## Prometheus

With `metrics.port = 9090` in the settings, or `--set metrics.port=9090`, `run` and `train` answer `GET /metrics` on
this machine (`metrics.host`) while they go on. All that is named above is there as it was written last,
`rollout/reward_mean` as `rollfeed_rollout_reward_mean`; what a run names itself is a label, as in
`rollfeed_rollout_wasted_tokens{reason="stale"}` and `rollfeed_sources_reward_mean{name="gsm8k"}`; `pass@4` is
`pass_at_4`, and `pass^4` is `pass_hat_4`. While a step is made, `rollfeed_step` is its number, and
`rollfeed_groups_total{state="submitted"}` (`kept`, `dropped`), `rollfeed_rollouts_total` and
`rollfeed_response_tokens_total` grow; `rollfeed_last_metrics_timestamp_seconds` tells a run that stands still.
"""


class Described(NamedTuple):
    """Metrics that share a description, and the module that makes them."""

    names: tuple[str, ...]
    text: str
    module: str


def described_metrics() -> list[Described]:
    """Return all metrics that are described, in the order of the code."""
    found = [
        Described(tuple(names.split(", ")), text, str(path.relative_to(_PACKAGE)))
        for path in sorted(_PACKAGE.rglob("*.py"))
        for names, text in _BESIDE.findall(path.read_text(encoding="utf-8"))
    ]
    for part, pattern, name in _COUNTS:
        for path in sorted(_PACKAGE.glob(pattern)):
            found += _fields(part, path, name)
    return found


def _fields(part: str, path: Path, name: str) -> Iterator[Described]:
    (body,) = (
        node.body
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    for field, behind in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            described = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
            text = str(behind.value.value) if described else field.target.id.replace("_", " ")  # type: ignore[union-attr]
            yield Described((f"{part}/{field.target.id}",), text.rstrip("."), str(path.relative_to(_PACKAGE)))


def page() -> str:
    """Return docs/metrics.md."""
    text = _HEAD + "".join(f"| `{name}` | {good} | {otherwise} |\n" for name, good, otherwise in _WATCHED) + _FOOT
    described = described_metrics()
    for part, about in _PARTS.items():
        rows = [
            f"| {', '.join(f'`{name}`' for name in each.names)} | {each.text} | `{each.module}` |\n"
            for each in described
            if each.names[0].startswith(f"{part}/")
        ]
        if rows:
            text += f"\n## {part}\n\n{about}\n\n| name | description | made in |\n|---|---|---|\n{''.join(rows)}"
    return f"{text}\n{_PROMETHEUS}"


if __name__ == "__main__":
    print(page(), end="")
