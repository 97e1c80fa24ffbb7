"""Samples beside what an engine has sampled: each turn once, after the same tokens, with the same bits."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from rollfeed.base.true_runs import runs_of
from rollfeed.benchmarks.gateway.fake_policy import EngineTurn, digest
from rollfeed.types import Sample


class SampledOnce(msgspec.Struct, kw_only=True):
    """Samples beside the turns of an engine."""

    num_samples: int = 0
    num_trained: int = 0
    """Turns."""
    unsampled: list[str] = []
    """Turns that no engine has sampled so after their context."""
    doubled: list[str] = []
    """Turns that are trained again."""
    untrained: list[str] = []
    """Contexts after which something was sampled that is in no sample."""


def compare(samples: Iterable[Sample], sampled: Iterable[EngineTurn]) -> SampledOnce:
    """Look for each turn of the samples among those of an engine, by all tokens before it."""
    found = SampledOnce()
    left: dict[tuple[str, bytes, bytes], int] = {}
    for turn in sampled:
        key = (turn.context, _bits(turn.token_ids, np.int32), _bits(turn.logprobs, np.float32))
        left[key] = left.get(key, 0) + 1
    known = frozenset(left)
    for sample in samples:
        found.num_samples += 1
        for start, end in runs_of(sample.loss_mask != 0.0):
            found.num_trained += 1
            first = len(sample.token_ids) - sample.response_length + start
            token_ids = sample.token_ids[first : first + end - start]
            key = (
                digest(sample.token_ids[:first]),
                _bits(token_ids, np.int32),
                _bits(sample.logprobs[start:end], np.float32),
            )
            name = f"sample {sample.index}, tokens {start} to {end}"
            if key not in known:
                found.unsampled.append(name)
            elif not left[key]:
                found.doubled.append(name)
            else:
                left[key] -= 1
    found.untrained = [context for (context, _, _), count in left.items() for _ in range(count)]
    return found


def _bits(values: object, kind: type[np.generic]) -> bytes:
    return np.ascontiguousarray(values, kind).tobytes()
