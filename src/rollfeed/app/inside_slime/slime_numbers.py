"""Numbers about slime's samples under slime's names."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from rollfeed.compat.slime_plugins.shared_run import leaves
from rollfeed.evaluation.statistics import pass_at_k, powers_of_two

_REPEATED_CHARACTERS = 10_000
"""At the end of a response that is longer."""
_REPEATED_RATIO = 10.0
"""A text that is compressed to less than a tenth repeats itself."""


def sample_numbers(args: Any, samples: Sequence[Any], *, reward_key: str | None) -> dict[str, float]:
    """Return what slime computes of samples: lengths, groups with one reward, repetition, truncation, reused tokens.

    ``samples`` are scored ones, at least one.
    """
    lengths = [each.effective_response_length for each in samples]
    numbers = {f"response_len/{name}": float(getattr(np, name)(lengths)) for name in ("mean", "median", "max", "min")}
    if getattr(args, "advantage_estimator", None) != "ppo":
        by_group: dict[Any, list[float]] = {}
        for sample in samples:
            by_group.setdefault(sample.group_index, []).append(reward_of(sample, reward_key))
        equal = Counter(str(round(found[0], 1)) for found in by_group.values() if len(set(found)) == 1)
        numbers |= {f"zero_std/count_{reward}": float(count) for reward, count in equal.items()}
    numbers["repetition_frac"] = fmean(_repeats(each.response) for each in samples)
    numbers["truncated_ratio"] = fmean(each.status.value == "truncated" for each in samples)
    infos = [info for each in samples if (info := getattr(each, "prefix_cache_info", None)) is not None]
    if infos:
        cached, asked = sum(each.cached_tokens for each in infos), sum(each.total_prompt_tokens for each in infos)
        numbers["prefix_cache_hit_rate"] = cached / asked if asked else 0.0
        numbers["avg_cached_tokens_per_sample"] = cached / len(samples)
    return numbers


def pass_rates(groups: Sequence[Sequence[Any]], *, reward_key: str | None) -> dict[str, float]:
    """Return ``pass@k`` of groups of one size; answers are right whose last sample has a reward of 1."""
    size = len(groups[0])
    right = [sum(reward_of(leaves([each])[-1], reward_key) == 1 for each in group) for group in groups]
    return {f"pass@{k}": fmean(pass_at_k(size, count, k) for count in right) for k in powers_of_two(size) if size > 1}


def reward_of(sample: Any, reward_key: str | None) -> float:
    """Return a sample's reward as a number."""
    return float(sample.reward[reward_key] if reward_key else sample.reward)


def named(prefix: str, numbers: dict[str, float]) -> dict[str, float]:
    """Return numbers with something before their names."""
    return {f"{prefix}{name}": value for name, value in numbers.items()}


def _repeats(text: str) -> bool:
    if len(text) <= _REPEATED_CHARACTERS:
        return False
    end = text[-_REPEATED_CHARACTERS:].encode()
    return len(end) > _REPEATED_RATIO * len(zlib.compress(end, 9))
