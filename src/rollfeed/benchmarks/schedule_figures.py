"""From what was seen of a run to its figures.

A request's tokens are counted in a window as far as it ran there. An engine makes one token a step for each request,
so one that ended at a time began, at the latest step's length, so many steps before: what it waited before that is
not counted as running.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rollfeed.benchmarks.schedule_records import CommitLog, Fate, PromptKey, RecordingEngine, RequestRecord
from rollfeed.benchmarks.schedule_workload import NumberedPrompts, ScheduleWorkload
from rollfeed.testing.fake_sglang import bound_tokens_per_second, draw_length, mean_length

DISCARDED = "discarded"
"""Tokens of prompts that were thrown away by the scheduler, aborted or finished."""
RESTARTED = "restarted"
"""Tokens of prompts that were trained on in the end, with other responses."""
UNRETURNED = "unreturned"
"""Tokens that engines made and no request brought back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The servers' counters, all servers together, at a time of ``time.monotonic``."""

    at: float
    generated_tokens: int
    busy_slot_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is measured: from the delivery of one batch to that of another."""

    first_step: int
    """The first step whose batch was made within."""
    last_step: int
    began: Snapshot
    ended: Snapshot
    num_drawn: int
    """Prompts drawn until its end, since the start of the run."""

    @property
    def seconds(self) -> float:
        return self.ended.at - self.began.at

    @property
    def generated_tokens(self) -> int:
        return self.ended.generated_tokens - self.began.generated_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is printed."""

    efficiency: float
    """Tokens of the window that were trained on, then or later, over what the engines could have made in it."""
    efficiency_of_possible: float
    """The same with the filtered share taken off what could have been made."""
    idle: float
    """Share of the slots' time in which they held no request."""
    wasted_fraction: float
    """Tokens of the window never trained on, over all made in it."""
    wasted_by_reason: dict[str, float]
    length_bias: float
    """Mean length of what was trained until the window's end over that of all prompts drawn until then, less 1."""
    mean_length_trained: float
    mean_length_drawn: float
    versions: dict[str, float]
    bound_tokens_per_second: float
    """Of all engines: all slots full, no prompt to compute."""
    mean_length_expected: float
    window: dict[str, float]


def figures(workload: ScheduleWorkload, window: Window, engine: RecordingEngine, log: CommitLog) -> Figures:
    """Return the figures of a run whose prompts of the window are all decided."""
    used, wasted = count_tokens(engine.records, log.fates, window, step_seconds=_full_step_seconds(workload))
    bound = workload.num_engines * bound_tokens_per_second(workload.time_model)
    possible = bound * window.seconds
    trained, drawn = lengths(workload, window, engine.sampling_seeds, log.fates)
    busy_seconds = window.ended.busy_slot_seconds - window.began.busy_slot_seconds
    return Figures(
        efficiency=used / possible,
        efficiency_of_possible=used / (possible * (1.0 - workload.filtered_share)),
        idle=1.0 - busy_seconds / (workload.total_slots * window.seconds),
        wasted_fraction=sum(wasted.values()) / window.generated_tokens,
        wasted_by_reason={reason: tokens / window.generated_tokens for reason, tokens in sorted(wasted.items())},
        length_bias=float(np.mean(trained) / np.mean(drawn)) - 1.0,
        mean_length_trained=float(np.mean(trained)),
        mean_length_drawn=float(np.mean(drawn)),
        versions=_versions(engine, log, step_seconds=_full_step_seconds(workload)),
        bound_tokens_per_second=bound,
        mean_length_expected=mean_length(workload.time_model),
        window={
            "first_step": window.first_step,
            "last_step": window.last_step,
            "seconds": window.seconds,
            "seconds_at_the_bound": used / (bound * (1.0 - workload.filtered_share)),
            "generated_tokens": window.generated_tokens,
            "trained_tokens": used,
        },
    )


def count_tokens(
    records: dict[PromptKey, list[RequestRecord]],
    fates: dict[PromptKey, Fate],
    window: Window,
    *,
    step_seconds: float,
) -> tuple[float, dict[str, float]]:
    """Return the window's tokens that were trained on, and those that never were, by reason."""
    used = 0.0
    wasted: defaultdict[str, float] = defaultdict(float)
    for key, requests in records.items():
        within = sum(_tokens_within(request, window, step_seconds) for request in requests)
        fate = fates.get(key)
        if fate is None or not fate.is_trained:
            wasted[DISCARDED if fate is None else fate.dropped_as or DISCARDED] += within
            continue
        made = sum(request.num_tokens for request in requests)
        share = min(1.0, sum(fate.lengths) / made) if made else 0.0
        used += share * within
        wasted[RESTARTED] += (1.0 - share) * within
    unreturned = window.generated_tokens - used - sum(wasted.values())
    return used, {reason: tokens for reason, tokens in {**wasted, UNRETURNED: max(0.0, unreturned)}.items() if tokens}


def lengths(
    workload: ScheduleWorkload, window: Window, seeds: dict[PromptKey, list[int]], fates: dict[PromptKey, Fate]
) -> tuple[list[int], list[int]]:
    """Return the lengths of all that was trained until the window's end, and of all drawn until then.

    Of what was thrown away the lengths are those that it would have had.
    """
    trained = [
        length
        for fate in fates.values()
        if fate.is_trained and fate.step <= window.last_step
        for length in fate.lengths
    ]
    source = NumberedPrompts(prompt_tokens=workload.prompt_tokens, seed=workload.seed)
    drawn: list[int] = []
    for number in range(window.num_drawn):
        token_ids = source.prompt(number).token_ids
        key = token_ids.tobytes()
        if key in fates:
            drawn += fates[key].lengths
        else:
            asked = seeds.get(key, [])[-workload.n_samples_per_prompt :]
            drawn += [draw_length(workload.time_model, token_ids, seed) for seed in asked]
    return trained, drawn


def _tokens_within(request: RequestRecord, window: Window, step_seconds: float) -> float:
    began = max(request.started, request.ended - request.num_tokens * step_seconds)
    overlap = min(request.ended, window.ended.at) - max(began, window.began.at)
    if overlap <= 0.0 or request.num_tokens == 0:
        return 0.0
    return request.num_tokens * overlap / (request.ended - began)


def _full_step_seconds(workload: ScheduleWorkload) -> float:
    return workload.time_model.step_seconds(workload.num_slots)


def _versions(engine: RecordingEngine, log: CommitLog, *, step_seconds: float) -> dict[str, float]:
    updates = engine.update_times
    finished = [
        request
        for key, requests in engine.records.items()
        if key in log.fates and log.fates[key].is_trained
        for request in requests
        if request.has_finished
    ]
    spanning = [
        bool(updates) and (request.is_resumed or _meets(request, updates, step_seconds)) for request in finished
    ]
    return {
        "updates": float(len(updates)),
        "spanning_share": float(np.mean(spanning)) if spanning else 0.0,
        "staleness_mean": float(np.mean(log.ages)) if log.ages else 0.0,
        "staleness_max": float(max(log.ages, default=0)),
    }


def _meets(request: RequestRecord, times: Sequence[float], step_seconds: float) -> bool:
    began = max(request.started, request.ended - request.num_tokens * step_seconds)
    return any(began < at < request.ended for at in times)


def as_json(result: Figures) -> dict[str, Any]:
    """Return JSON values."""
    return asdict(result)
