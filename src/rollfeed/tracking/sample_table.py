"""Rows of a table of samples, for people."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from rollfeed.errors import RewardError
from rollfeed.protocols import SampleRow
from rollfeed.types import Group, Sample
from rollfeed.types.text import well_formed

_MAX_CHARACTERS = 10_000
"""Of a prompt or a response; of longer ones the middle is left out."""


def sample_rows(groups: Sequence[Group], *, count: int, reward_key: str | None) -> list[SampleRow]:
    """Return ``count`` samples of groups as rows, spread evenly over them; all where there are fewer."""
    samples = [(group, sample) for group in groups for sample in group.samples]
    chosen = np.unique(np.linspace(0, len(samples) - 1, min(count, len(samples))).round().astype(int))
    return [_row(*samples[number], reward_key=reward_key) for number in chosen]


def _row(group: Group, sample: Sample, *, reward_key: str | None) -> SampleRow:
    try:
        reward = sample.get_reward_value(reward_key)
    except RewardError:
        reward = None
    label = sample.label if isinstance(sample.label, str) else json.dumps(sample.label, default=str)
    return {
        "source": group.prompt.source,
        "group_index": group.group_index,
        "prompt": _shown(group.prompt.text),
        "response": _shown(sample.response),
        "label": _shown(label),
        "reward": reward,
        "status": sample.status.value,
        "response_length": sample.response_length,
    }


def _shown(text: str) -> str:
    text, half = well_formed(text), _MAX_CHARACTERS // 2
    left_out = len(text) - _MAX_CHARACTERS
    return text if left_out <= 0 else f"{text[:half]} [... {left_out} characters ...] {text[-half:]}"
