"""Reward functions that the tests call in workers."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollfeed.types import Correct, Outcome, Prompt, Sample, Verdict

HANGING = 30


def score(sample: Sample, prompt: Prompt) -> Any:
    """Do what the label says."""
    match prompt.label:
        case "length":
            return len(sample.response)
        case "numpy":
            return np.float32(0.5)
        case "dictionary":
            return {"score": np.int64(1), "style": 0.5}
        case "verdict":
            return Verdict(reward=1.0, correct=Correct.YES, extracted=sample.response)
        case "failed":
            return Verdict(reward=None, outcome=Outcome.ERROR, detail="judge is ill")
        case "nan":
            return float("nan")
        case "infinite":
            return float("inf")
        case "none":
            return None
        case "text":
            return "0.5"
        case "object":
            return object()
        case "raise":
            raise ZeroDivisionError("by zero")
        case "exit":
            raise SystemExit(1)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(3600)
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
    return 0.0


def sleep_on_one(sample: Sample, prompt: Prompt) -> float:
    if sample.rollout_id == HANGING:
        time.sleep(3600)
    return float(sample.rollout_id)


def spin_on_one(sample: Sample, prompt: Prompt) -> float:
    while sample.rollout_id == HANGING:
        pass
    return float(sample.rollout_id)


def given(sample: Sample, prompt: Prompt) -> Any:
    return prompt.label


_CALLS = itertools.count(1)


def count_groups(samples: Sequence[Sample], prompt: Prompt) -> Any:
    """Say for each sample which call of this process it came in, with how many, and where among them."""
    assert len({sample.group_index for sample in samples}) == 1
    call, samples_together = next(_CALLS), len(samples)
    return [{"call": call, "samples": samples_together, "place": place} for place in range(samples_together)]


def rank(samples: Sequence[Sample], prompt: Prompt) -> Any:
    assert isinstance(prompt, Prompt)
    return np.arange(len(samples))


def rank_batch(samples: Sequence[Sample], prompts: Sequence[Prompt]) -> Any:
    assert len(samples) == len(prompts)
    return [{"score": float(number)} for number in range(len(samples))]


def too_few(samples: Sequence[Sample], prompt: Prompt) -> list[float]:
    return [0.0] * (len(samples) - 1)


def facts(sample: Sample, prompt: Prompt) -> dict[str, float]:
    """Say what arrived, for what must arrive unchanged."""
    return {
        "tokens": float(sample.token_ids.sum()),
        "mask": float(sample.loss_mask.sum()),
        "prompt_tokens": float(prompt.token_ids.sum()),
        "messages": float(len(prompt.messages or ())),
        "metadata": float(prompt.metadata["weight"]),
        "process": float(os.getpid()),
    }


async def asynchronous(sample: Sample, prompt: Prompt) -> float:
    await asyncio.sleep(0)
    return float(os.getpid())


def by_response(response: str, label: str, *, kind: str = "none") -> float:
    """Say with the reward what the arguments were."""
    return len(response) + (0.5 if (label, kind) == ("4", "sum") else 0.0)


def by_column(response: str, answer: str, missing: str) -> float:
    """Ask for a column that no row has."""
    raise AssertionError((response, answer, missing))


def as_in_trl(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Be a reward function of TRL's."""
    assert len(prompts) == len(completions) == len(answer) == len(columns["kind"]) == len(columns["completion_ids"])
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]


async def as_in_trl_later(completions: list[Any], **columns: Any) -> list[float]:
    """Be an async one."""
    return [float(len(columns["label"]) + len(completions))] * len(completions)
