"""What an evaluation during training leaves in the log, with the change since the first one.

Invariant: what is compared are answers to the same prompts; where the prompts are others, nothing is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from statistics import fmean
from typing import Any

from rollfeed.evaluation.results import EvalResult, SetResult
from rollfeed.evaluation.sets import what_is_asked
from rollfeed.evaluation.statistics import paired_interval


def log_record(result: EvalResult, *, step: int, first: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a line of eval.jsonl: the numbers, the change since ``first``, and the right answers to each prompt.

    Args:
        result: What was found.
        step: Batches trained on before it.
        first: The line of the first evaluation; None where this is it.
    """
    record: dict[str, Any] = {"step": step, **result.summary()}
    record["prompts"] = {each.name: {"digest": _digest(each), "right": list(each.right_P)} for each in result.sets}
    changes = {} if first is None else {each.name: _change(each.name, first, record) for each in result.sets}
    return {**record, "change": {name: change for name, change in changes.items() if change is not None}}


def _digest(found: SetResult) -> str:
    """Return what differs where a set asks something else, or in another order."""
    digest = blake2b(digest_size=8)
    for group in found.groups:
        for part in map(repr, what_is_asked(group.prompt)):
            digest.update(part.encode())
    return digest.hexdigest()


def _change(name: str, first: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the change of the accuracy over the prompts that both evaluations scored, with its paired interval."""
    before, after = first.get("prompts", {}).get(name), last["prompts"][name]
    if before is None or before["digest"] != after["digest"]:
        return None
    trials = [record["sets"][name]["n_samples_per_prompt"] for record in (first, last)]
    pairs = [pair for pair in zip(before["right"], after["right"], strict=True) if None not in pair]
    if not pairs:
        return None
    before_P, after_P = ([pair[side] / trials[side] for pair in pairs] for side in (0, 1))
    low, high = paired_interval(before_P, after_P, trials_before=trials[0], trials_after=trials[1])
    return {
        "since": first["step"],
        "num_prompts": len(pairs),
        "accuracy": fmean(after_P) - fmean(before_P),
        "low": low,
        "high": high,
    }
