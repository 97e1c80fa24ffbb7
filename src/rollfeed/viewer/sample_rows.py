"""The samples of a run or an evaluation that somebody asks for, a row each, without their tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollfeed.errors import ConfigError
from rollfeed.store import RunReader
from rollfeed.store.finding import FoundSample, SampleFilter, find_answers, find_samples
from rollfeed.store.layout import ANSWERS_FILE
from rollfeed.viewer.found_runs import is_evaluation

_QUESTION_CHARACTERS = 300
_HAS_COMPARISON = re.compile(r"[<>=~]")


def sample_rows(path: Path, *filters: str, num: int, worst: bool = False) -> dict[str, Any]:
    """Return ``rows``, and whether there are ``more``.

    Args:
        path: A run directory, or an evaluation's.
        filters: As :class:`SampleFilter` has them; at most one may be none, and is a text that responses have.
        num: How many rows at most.
        worst: The lowest rewards first, in place of the newest steps.

    Raises:
        RollfeedError: If a filter is wrong, or files cannot be read.
    """
    asked = _asked(filters)
    if is_evaluation(path):
        found, more = find_answers(path / ANSWERS_FILE, asked, num=num, worst=worst)
    else:
        with RunReader(path) as reader:
            found, more = find_samples(reader, asked, num=num, worst=worst)
    return {"rows": [_row(sample) for sample in found], "more": more}


def _asked(filters: Sequence[str]) -> SampleFilter:
    conditions = [text for text in filters if _HAS_COMPARISON.search(text) or _is_words(text)]
    texts = [text for text in filters if text not in conditions]
    return SampleFilter(*conditions, response=" ".join(texts) if texts else None)


def _is_words(text: str) -> bool:
    try:
        return bool(SampleFilter(text))
    except ConfigError:
        return False


def _row(sample: FoundSample) -> dict[str, Any]:
    return {
        "id": id_of(sample.step, sample.group_index, sample.member, sample.index, sample.source),
        "step": sample.step,
        "group": sample.group_index,
        "member": sample.member,
        "source": sample.source,
        "reward": sample.reward,
        "correct": sample.correct,
        "status": sample.status,
        "length": sample.response_length,
        "drop_reason": sample.drop_reason,
        "error": sample.error is not None,
        "question": " ".join(sample.question[: 2 * _QUESTION_CHARACTERS].split())[:_QUESTION_CHARACTERS],
    }


def id_of(step: int | None, group_index: int, member: int, index: int | None, source: str) -> str:
    """Return what names a sample: step, group, rollout in it and index, or group, answer and set of an evaluation."""
    if step is None:
        return f"{group_index}.{member}.{source}"
    return f"{step}.{group_index}.{member}.{'' if index is None else index}"
