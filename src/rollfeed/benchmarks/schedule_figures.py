"""Figures of a run from what is seen of it from outside: its requests at the engine, and its commits.

A request's tokens are counted in a window as far as it ran there. An engine makes one token a step for each request,
so one that ended at a time began, at the latest step's length, so many steps before: what it waited before that is
not counted as running.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollfeed.benchmarks.schedule_workload import NumberedPrompts, ScheduleWorkload
from rollfeed.engine.client import ServerEngine
from rollfeed.testing.fake_sglang import bound_tokens_per_second, draw_length, mean_length
from rollfeed.types import Completion, FinishKind, Group, Picture, Sample, SamplingParams, StepCommit

DISCARDED = "discarded"
"""Tokens of prompts that were thrown away by the scheduler, aborted or finished."""
RESTARTED = "restarted"
"""Tokens of prompts that were trained on in the end, with other responses."""
UNRETURNED = "unreturned"
"""Tokens that engines made and no request brought back."""
PromptKey: TypeAlias = bytes
"""The ids of a prompt, of which there are no two alike."""
_SEED_MASK = (1 << 31) - 1
"""Of the seed that a server is sent for a response that begins."""


class RequestRecord(NamedTuple):
    """One request at the engine that came back; times are of ``time.monotonic``."""

    started: float
    """When it was handed to the engine client, where it may have waited."""
    ended: float
    num_tokens: int
    has_finished: bool
    """Whether it came to its own end, and was not aborted."""
    is_resumed: bool
    """Whether it went on with a response that an earlier request began."""


class RecordingEngine(ServerEngine):
    """The SGLang client; remembers what it was asked for."""

    def __init__(self, *args: Any, prompt_tokens: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompt_tokens = prompt_tokens
        self.records: defaultdict[PromptKey, list[RequestRecord]] = defaultdict(list)
        self.sampling_seeds: defaultdict[PromptKey, list[int]] = defaultdict(list)
        """As servers get them, of the requests that begin a response: they fix its length."""
        self.update_times: list[float] = []

    async def generate(
        self, token_ids: NDArray[np.int32], params: SamplingParams, *, request_id: str, images: Sequence[Picture] = ()
    ) -> Completion:
        """As :meth:`ServerEngine.generate`."""
        key = np.asarray(token_ids[: self._prompt_tokens], np.int32).tobytes()
        is_resumed = len(token_ids) > self._prompt_tokens
        if not is_resumed:
            self.sampling_seeds[key].append((params.seed or 0) & _SEED_MASK)
        started = time.monotonic()
        completion = await super().generate(token_ids, params, request_id=request_id, images=images)
        self.records[key].append(
            RequestRecord(
                started=started,
                ended=time.monotonic(),
                num_tokens=len(completion.token_ids),
                has_finished=completion.finish_reason.kind is not FinishKind.ABORT,
                is_resumed=is_resumed,
            )
        )
        return completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The end of a prompt: trained on, or dropped."""

    step: int
    """That decided it."""
    dropped_as: str | None
    """None: it was trained on."""
    lengths: tuple[int, ...]
    """Of its responses, without what the model was told in between."""

    @property
    def is_trained(self) -> bool:
        return self.dropped_as is None


class CommitLog:
    """The commits of all steps so far."""

    def __init__(self) -> None:
        self.fates: dict[PromptKey, Fate] = {}
        self.pending: frozenset[PromptKey] = frozenset()
        """Prompts that the latest step has left for later ones."""
        self.ages: list[int] = []
        """Of trained samples: versions between their oldest token and their batch."""

    def add(self, commit: StepCommit) -> None:
        """Take note of a step."""
        step, state = commit.batch.step, commit.state
        for group in commit.batch.groups:
            self.fates[prompt_key(group)] = _fate(group, step, None)
        for dropped in commit.dropped:
            self.fates[prompt_key(dropped.group)] = _fate(dropped.group, step, dropped.reason)
        self.pending = frozenset(prompt_key(each) for each in (*state.requeued, *state.in_flight, *state.surplus))
        self.ages += _ages(commit.batch.samples, commit.batch.policy_version)


def prompt_key(drawn: Any) -> PromptKey:
    """Return the key of what has a prompt: a group or a draw."""
    return bytes(drawn.prompt.token_ids.tobytes())


def _fate(group: Group, step: int, reason: str | None) -> Fate:
    lengths = (sum(int(sample.loss_mask.sum()) for sample in each.samples) for each in group.rollouts)
    return Fate(step=step, dropped_as=reason, lengths=tuple(lengths))


def _ages(samples: Sequence[Sample], policy_version: int) -> Iterator[int]:
    for sample in samples:
        if sample.oldest_version is not None:
            yield policy_version - sample.oldest_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The servers' counters, all servers together, at a time of ``time.monotonic``."""

    at: float
    generated_tokens: int
    busy_slot_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWindow:
    """The measured part of a run: from the delivery of one batch to that of another."""

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


def figures(
    workload: ScheduleWorkload, window: MeasuredWindow, engine: RecordingEngine, log: CommitLog
) -> dict[str, Any]:
    """Return the figures of a run whose prompts of the window are all decided, as JSON values.

    ``efficiency`` is of the window's tokens that were trained on, then or later, to what the engines could have made
    in it: all slots full, no prompt to compute; ``efficiency_of_possible`` the same with the filtered share taken off.
    ``wasted_fraction`` is of tokens never trained on to all of the window, ``length_bias`` the mean length of what was
    trained until the window's end over that of all prompts drawn until then, less 1.
    """
    used, wasted = count_tokens(engine.records, log.fates, window, step_seconds=_full_step_seconds(workload))
    bound = workload.num_engines * bound_tokens_per_second(workload.time_model)
    possible = bound * window.seconds
    trained, drawn = (float(np.mean(each)) for each in lengths(workload, window, engine.sampling_seeds, log.fates))
    busy_seconds = window.ended.busy_slot_seconds - window.began.busy_slot_seconds
    return {
        "efficiency": used / possible,
        "efficiency_of_possible": used / (possible * (1.0 - workload.filtered_share)),
        "idle": 1.0 - busy_seconds / (workload.total_slots * window.seconds),
        "wasted_fraction": sum(wasted.values()) / window.generated_tokens,
        "wasted_by_reason": {reason: tokens / window.generated_tokens for reason, tokens in sorted(wasted.items())},
        "length_bias": trained / drawn - 1.0,
        "mean_length_trained": trained,
        "mean_length_drawn": drawn,
        "versions": _versions(engine, log, step_seconds=_full_step_seconds(workload)),
        "bound_tokens_per_second": bound,
        "mean_length_expected": mean_length(workload.time_model),
        "window": {
            "first_step": window.first_step,
            "last_step": window.last_step,
            "seconds": window.seconds,
            "seconds_at_the_bound": used / (bound * (1.0 - workload.filtered_share)),
            "generated_tokens": window.generated_tokens,
            "trained_tokens": used,
        },
    }


def count_tokens(
    records: dict[PromptKey, list[RequestRecord]],
    fates: dict[PromptKey, Fate],
    window: MeasuredWindow,
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
    workload: ScheduleWorkload, window: MeasuredWindow, seeds: dict[PromptKey, list[int]], fates: dict[PromptKey, Fate]
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


def _tokens_within(request: RequestRecord, window: MeasuredWindow, step_seconds: float) -> float:
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
