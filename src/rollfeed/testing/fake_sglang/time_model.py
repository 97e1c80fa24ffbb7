"""A continuous-batching engine that computes nothing but when it would be done.

Between two events (an arrival, an end, an abort, a full budget) all steps are alike, so one timer at
the next event is enough, whatever the number of tokens. What a late timer finds due happened in time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.base.sglang_wire import ABORTED, Usage
from rollfeed.seeds import derive_seed
from rollfeed.testing.fake_sglang.clock import Clock, Timer
from rollfeed.testing.fake_sglang.settings import TimeModelSettings
from rollfeed.testing.fake_sglang.tokens import END_ID, Output, Response, find_response, token_pool
from rollfeed.testing.fake_sglang.wire import FakeJob
from rollfeed.testing.prefix_cache import PrefixCache

_ROUNDING = 1e-6
"""Of a step: a timer for its end may come this much early."""
_RESERVE_STEPS = 32
"""A request is let in when the budget has room for so many further steps of all."""
_REPORTED_STEPS = 40
"""What was put back is told of for so many steps, as SGLang does (``decode_log_interval``)."""
_OUT_OF_MEMORY = {
    "type": "abort",
    "message": "Out of memory: the request alone exceeds the token budget.",
    "status_code": 500,
    "err_type": "InternalServerError",
}


_NORMAL = NormalDist()
_NO_PAGES = np.zeros(0, np.uint64)


def draw_length(settings: TimeModelSettings, prompt_ids: NDArray[np.int32], sample_key: str | int) -> int:
    """Return the tokens of a response: capped lognormal, fixed by the seed, the prompt and the sample."""
    prompt_key = blake2b(np.ascontiguousarray(prompt_ids, np.int32).tobytes(), digest_size=8).hexdigest()
    between = _standard_normal("length", settings.seed, prompt_key)
    within = _standard_normal("length", settings.seed, prompt_key, sample_key)
    exponent = math.log(settings.median_length) + settings.sigma_between * between + settings.sigma_within * within
    return max(1, min(settings.max_length, round(math.exp(min(exponent, 60.0)))))


def mean_length(settings: TimeModelSettings) -> float:
    """Return the expected tokens of a response, in closed form: the mean of a lognormal that is cut at the cap."""
    mu, cap = math.log(settings.median_length), settings.max_length
    sigma = math.hypot(settings.sigma_between, settings.sigma_within)
    if sigma == 0.0:
        return min(settings.median_length, cap)
    z = (math.log(cap) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _NORMAL.cdf(z - sigma) + cap * (1.0 - _NORMAL.cdf(z))


def bound_tokens_per_second(settings: TimeModelSettings, *, prompt_tokens: int = 0) -> float:
    """Return the most response tokens a second of one engine: all slots full, each prompt computed once."""
    length = mean_length(settings)
    return length / (_decode_seconds(settings, length) + prompt_tokens * settings.prefill_us_per_token / 1e6)


def bound_seconds(
    settings: TimeModelSettings, lengths: Sequence[int], *, prompt_tokens: int = 0, num_engines: int = 1
) -> float:
    """Return the least seconds in which engines can make responses of these lengths."""
    decode = _decode_seconds(settings, float(sum(lengths)))
    return (decode + len(lengths) * prompt_tokens * settings.prefill_us_per_token / 1e6) / num_engines


def _decode_seconds(settings: TimeModelSettings, num_tokens: float) -> float:
    best = max((size / settings.step_seconds(size) for size in range(1, settings.num_slots + 1)), default=1.0)
    return num_tokens / best


def _standard_normal(*parts: str | int) -> float:
    return _NORMAL.inv_cdf((derive_seed(*parts) + 0.5) / 2**64)


@dataclass(slots=True, eq=False)
class _SlotRow:
    """A job in the engine."""

    job: FakeJob
    response: Response | None
    """None for a job that ignores the end of its response."""
    offset: int
    """Tokens of the response, or of the pool, before this job's."""
    target: int
    """Tokens to make."""
    pages: NDArray[np.uint64]
    """Of its prompt in the prefix cache; empty without one."""
    made: int = 0
    shared_tokens: int = 0
    """Those that the prefix cache holds for it, while it runs."""
    num_flushes: int = 0
    """Before its prompt was computed."""

    @property
    def held_tokens(self) -> int:
        return self.job.prompt_tokens + self.made

    def output(self) -> Output:
        if self.response is None:
            return token_pool().output(self.offset, self.made)
        return self.response.output(self.offset, self.offset + self.made)


class TimeModel:
    """Slots, steps, prefill and a token budget on a clock."""

    def __init__(self, settings: TimeModelSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._running: list[_SlotRow] = []
        self._waiting: deque[_SlotRow] = deque()
        self._ended: list[Callable[[], None]] = []
        self._own_tokens = 0
        """Of running requests, those that the prefix cache does not hold."""
        self._generated_tokens = 0
        self._busy_slot_seconds = 0.0
        self._boundary = clock.now()
        """When the current step began, or when prefill will be done."""
        self._is_paused = False
        self._is_telling = False
        self._timer: Timer | None = None
        self._cache = PrefixCache(settings.page_tokens)
        self.num_retractions = 0
        """Requests put back, all together."""
        self._prefilled_tokens = 0
        self._retracted: deque[float] = deque()
        """When requests were put back lately."""

    def submit(self, job: FakeJob) -> None:
        row = self._row(job)
        if row.target == 0:
            job.end(row.output(), {"type": "length", "length": 0})
            return
        self._advance()
        job.arrived = self._clock.now()
        self._waiting.append(row)
        self._settle()

    def abort(self, concerned: Callable[[FakeJob], bool]) -> int:
        self._advance()
        rows = [row for row in (*self._running, *self._waiting) if concerned(row.job)]
        self._remove(rows)
        for row in rows:
            self._end(row, ABORTED)
        self._settle()
        return len(rows)

    def pause(self, mode: str) -> None:
        self._advance()
        self._is_paused = True
        if mode == "abort":
            self.abort(lambda _: True)
        elif mode == "retract":
            while self._running:
                self._retract()
        self._settle()

    def resume(self) -> None:
        self._is_paused = False
        self._boundary = max(self._boundary, self._clock.now())
        self._settle()

    def stall(self, seconds: float) -> None:
        self._advance()
        self._boundary = max(self._boundary, self._clock.now()) + seconds
        self._settle()

    def flush(self) -> None:
        self._cache.clear()

    def progress(self) -> Sequence[tuple[FakeJob, int]]:
        self._advance()
        self._settle()
        return [(row.job, row.made) for row in (*self._running, *self._waiting)]

    def usage(self) -> Usage:
        self._advance()
        self._settle()
        num_running = len(self._running)
        is_busy = num_running > 0 and not self._is_paused
        since = self._clock.now() - _REPORTED_STEPS * self._settings.step_seconds(num_running)
        while self._retracted and self._retracted[0] < since:
            self._retracted.popleft()
        return Usage(
            num_running=num_running,
            num_waiting=len(self._waiting),
            num_used_tokens=self._used_tokens,
            num_uncached_tokens=sum(row.held_tokens for row in self._waiting),
            max_total_tokens=self._settings.kv_budget_tokens,
            max_running=self._settings.num_slots,
            tokens_per_second=num_running / self._settings.step_seconds(num_running) if is_busy else 0.0,
            generated_tokens=self._generated_tokens,
            busy_slot_seconds=self._busy_slot_seconds,
            num_retracted=len(self._retracted),
            prefilled_tokens=self._prefilled_tokens,
            prefill_seconds=self._prefilled_tokens * self._settings.prefill_us_per_token / 1e6,
        )

    @property
    def _used_tokens(self) -> int:
        """Tokens of running requests, each that they share counted once."""
        return self._own_tokens + self._cache.num_used_tokens

    def _row(self, job: FakeJob) -> _SlotRow:
        prompt_ids = job.prompt_ids()
        pages = self._cache.keys_of(prompt_ids) if self._settings.prefix_cache else _NO_PAGES
        if job.ignore_eos:
            offset = draw_length(self._settings, prompt_ids, job.sample_key)
            return _SlotRow(job, None, offset, job.max_new_tokens, pages)
        found = find_response(prompt_ids)
        response, offset = found or (Response.of(draw_length(self._settings, prompt_ids, job.sample_key)), 0)
        return _SlotRow(job, response, offset, min(response.length - offset, job.max_new_tokens), pages)

    def _advance(self) -> None:
        """Do all steps that have ended by now."""
        now = self._clock.now()
        while not self._is_paused:
            if not self._running:
                self._boundary = max(self._boundary, self._waiting[0].job.arrived if self._waiting else now)
            self._admit()
            if not self._running:
                if not self._waiting or self._boundary > now:
                    return
                continue  # what can never fit has been ended; the next may fit
            step_seconds = self._settings.step_seconds(len(self._running))
            num_due = int((now - self._boundary) / step_seconds + _ROUNDING)
            if num_due <= 0:
                return
            self._step(min(num_due, self._steps_to_event()), step_seconds)

    def _admit(self) -> None:
        """Let requests in that were there when the step began."""
        latest = self._boundary + _ROUNDING * self._settings.step_ms / 1e3
        while self._can_admit() and self._waiting[0].job.arrived <= latest:
            row = self._waiting.popleft()
            if row.held_tokens + 1 > self._settings.kv_budget_tokens:
                self._end(row, _OUT_OF_MEMORY)
                continue
            self._running.append(row)
            num_tokens = self._enter(row)
            seconds = num_tokens * self._settings.prefill_us_per_token / 1e6
            self._boundary += seconds
            self._prefilled_tokens += num_tokens
            self._busy_slot_seconds += seconds * len(self._running)

    def _can_admit(self) -> bool:
        if not self._waiting or len(self._running) >= self._settings.num_slots:
            return False
        if not self._running:
            return True
        first = self._waiting[0]
        needed = first.held_tokens - self._cache.num_in_use(first.pages) + _RESERVE_STEPS * (len(self._running) + 1)
        return self._used_tokens + needed <= self._settings.kv_budget_tokens

    def _enter(self, row: _SlotRow) -> int:
        """Take the room of a request, and return how many of its tokens are to be computed."""
        num_cached = min(self._cache.num_held(row.pages), row.job.prompt_tokens - 1)
        if row.made == 0:
            row.job.cached_tokens = num_cached
        self._cache.use(row.pages)
        row.num_flushes = self._cache.num_clears
        row.shared_tokens = len(row.pages) * self._cache.page_tokens
        self._own_tokens += row.held_tokens - row.shared_tokens
        self._cache.shrink_to(self._settings.kv_budget_tokens - self._own_tokens)
        return row.held_tokens - num_cached

    def _leave(self, row: _SlotRow, *, has_ended: bool = False) -> None:
        """Give a request's room back, and hold what it has made unless the cache was flushed since."""
        self._own_tokens -= row.held_tokens - row.shared_tokens
        is_held = has_ended and self._settings.prefix_cache and row.num_flushes == self._cache.num_clears
        self._cache.leave(row.pages, is_held_again=is_held)
        if not is_held:
            return
        made = np.array(msgspec.json.decode(b"[" + b"".join(row.output().ids) + b"]", type=list[int]), np.int32)
        self._cache.hold(self._cache.keys_of(np.concatenate([row.job.prompt_ids(), made])))
        self._cache.shrink_to(self._settings.kv_budget_tokens - self._own_tokens)

    def _steps_to_event(self) -> int:
        """Return after how many steps something changes, at least 1."""
        if self._can_admit():
            return 1
        num_steps = min(row.target - row.made for row in self._running)
        room = (self._settings.kv_budget_tokens - self._used_tokens) // len(self._running)
        interval = self._settings.stream_interval
        streamed = [interval - row.made % interval for row in self._running if row.job.on_progress is not None]
        return max(1, min(num_steps, room, *streamed))

    def _step(self, num_steps: int, step_seconds: float) -> None:
        while self._used_tokens + len(self._running) > self._settings.kv_budget_tokens:
            if len(self._running) == 1:
                row = self._running[0]
                self._remove([row])
                self._end(row, _OUT_OF_MEMORY)
                return
            self._retract()
            num_steps = 1
        self._boundary += num_steps * step_seconds
        self._own_tokens += num_steps * len(self._running)
        self._cache.shrink_to(self._settings.kv_budget_tokens - self._own_tokens)
        self._generated_tokens += num_steps * len(self._running)
        self._busy_slot_seconds += num_steps * step_seconds * len(self._running)
        ended: list[_SlotRow] = []
        for row in self._running:
            row.made += num_steps
            if row.made >= row.target:
                ended.append(row)
            elif row.job.on_progress is not None and row.made % self._settings.stream_interval == 0:
                self._tell(row)
        self._remove(ended)
        for row in ended:
            is_whole = row.response is not None and row.offset + row.target == row.response.length
            self._end(row, {"type": "stop", "matched": END_ID} if is_whole else {"type": "length", "length": row.made})

    def _retract(self) -> None:
        """Put the newest request back; it is computed again when there is room."""
        row = self._running.pop()
        self._leave(row)
        row.job.num_retractions += 1
        self.num_retractions += 1
        self._retracted.append(self._boundary)
        self._waiting.appendleft(row)

    def _remove(self, rows: list[_SlotRow]) -> None:
        if not rows:
            return
        left = set(rows)
        for row in self._running:
            if row in left:
                self._leave(row, has_ended=True)
        self._running = [row for row in self._running if row not in left]
        self._waiting = deque(row for row in self._waiting if row not in left)

    def _end(self, row: _SlotRow, finish_reason: dict[str, object]) -> None:
        output = row.output()
        self._ended.append(lambda: row.job.end(output, finish_reason))

    def _tell(self, row: _SlotRow) -> None:
        output, on_progress = row.output(), row.job.on_progress

        def tell() -> None:
            if on_progress is not None and row.job.finish_reason is None:
                row.job.output = output
                on_progress(row.job)

        self._ended.append(tell)

    def _settle(self) -> None:
        """Tell what has ended, and set the timer to the next event."""
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self._ended:
                told, self._ended = self._ended, []
                for tell in told:
                    tell()
        finally:
            self._is_telling = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when = self._next_event()
        if when is not None:
            self._timer = self._clock.call_at(when, self._wake)

    def _next_event(self) -> float | None:
        if self._is_paused or not (self._running or self._waiting):
            return None
        if not self._running:
            return self._boundary
        return self._boundary + self._steps_to_event() * self._settings.step_seconds(len(self._running))

    def _wake(self) -> None:
        self._timer = None
        self._advance()
        self._settle()
