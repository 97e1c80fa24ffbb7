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
    """Return a line of eval.jsonl: the numbers, the right answers to each prompt, and the change since ``first``.

    Args:
        result: What was found.
        step: Batches trained on before it.
        first: The line of the first evaluation; None where this is it.
    """
    record = {"step": step, **result.summary()}
    for each in result.sets:
        found = record["sets"][each.name]
        found |= {"prompts": _digest(each), "right": list(each.right_P)}
        found["change"] = None if first is None else _change(first["sets"].get(each.name), found, since=first["step"])
    return record


def _digest(found: SetResult) -> str:
    """Return what differs where a set asks something else, or in another order."""
    digest = blake2b(digest_size=8)
    for group in found.groups:
        for part in map(repr, what_is_asked(group.prompt)):
            digest.update(part.encode())
    return digest.hexdigest()


def _change(before: Mapping[str, Any] | None, after: Mapping[str, Any], *, since: int) -> dict[str, Any] | None:
    """Return the change of the accuracy over the prompts that both evaluations scored, with its paired interval."""
    if before is None or before.get("prompts") != after["prompts"]:
        return None
    trials = before["n_samples_per_prompt"], after["n_samples_per_prompt"]
    pairs = [pair for pair in zip(before["right"], after["right"], strict=True) if None not in pair]
    if not pairs:
        return None
    before_P, after_P = ([pair[side] / trials[side] for pair in pairs] for side in (0, 1))
    low, high = paired_interval(before_P, after_P, trials_before=trials[0], trials_after=trials[1])
    return {
        "since": since,
        "num_prompts": len(pairs),
        "accuracy": fmean(after_P) - fmean(before_P),
        "low": low,
        "high": high,
    }
