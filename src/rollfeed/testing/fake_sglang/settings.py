"""How a fake server behaves; everything can be given as JSON, so that a process can be told."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from rollfeed.testing.fake_sglang.faults import ServerFault, check_limits


class FakeMode(StrEnum):
    """Where responses come from, and when."""

    SCRIPTED = "scripted"
    """From a list, at once or after a while; then as ZERO."""
    ZERO = "zero"
    """All of ``max_new_tokens``, at once, from text prepared beforehand."""
    TIME_MODEL = "time-model"
    """When a continuous-batching engine would be done."""


class Release(StrEnum):
    """Of SGLang, whose replies and ways are imitated."""

    V0_5_15 = "0.5.15"
    """New weights with ``flush_cache`` while requests are held end the server."""
    V0_5_23 = "0.5.23"
    """They are refused, and are there; replies name the version of every token; a paused server says nothing of its
    health and ends no request."""


class RouterDialect(StrEnum):
    """How a router lets its workers be listed and changed."""

    OLD = "old"
    """``/list_workers``, ``/add_worker?url=``, ``/remove_worker?url=``."""
    NEW = "new"
    """``GET`` and ``POST /workers``, ``DELETE /workers/{id}``."""


class ScriptedReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One response of SCRIPTED, used for the next sample that fits.

    Raises:
        ConfigError: If logprobs are not as many as ids.
    """

    output_ids: list[int] = []
    logprobs: list[float] | None = None
    """One a token; None makes some up."""
    text: str = ""
    finish_reason: str | dict[str, Any] | None = "stop"
    """``stop`` (matched: the last id), ``length`` or ``abort``, or the object itself."""
    delay_seconds: float = 0.0
    num_tokens_when_aborted: int = 0
    """How many of the ids an abort before ``delay_seconds`` finds made."""
    rid_prefix: str = ""
    """For requests whose id starts with it only."""
    status: int = 200
    """Anything else is answered with an error that says ``text``."""

    def __post_init__(self) -> None:
        num_ids = len(self.output_ids)
        check_limits(
            (
                self.logprobs is None or len(self.logprobs) == num_ids,
                f"logprobs: {len(self.logprobs or ())} for {num_ids} output_ids",
            ),
            (self.delay_seconds >= 0.0, f"delay_seconds = {self.delay_seconds}: must be at least 0"),
            (
                0 <= self.num_tokens_when_aborted <= num_ids,
                f"num_tokens_when_aborted = {self.num_tokens_when_aborted}: there are {num_ids} output_ids",
            ),
            (
                not isinstance(self.finish_reason, str) or self.finish_reason in ("stop", "length", "abort"),
                f"finish_reason = {self.finish_reason!r}: must be stop, length, abort or an object",
            ),
        )


LONGEST_RESPONSE = 26_000
"""The largest ``max_length``: a response carries its length in the id of its first token."""


class TimeModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A continuous-batching engine and the lengths of its responses.

    Raises:
        ConfigError: If a value is outside its range.
    """

    num_slots: int = 64
    step_ms: float = 8.0
    """One decoding step of no requests."""
    step_ms_per_request: float = 0.05
    fast_batch_size: int = 0
    """Beyond this many requests a step takes ``slow_factor`` times as long; 0 is no such limit."""
    slow_factor: float = 1.0
    prefill_us_per_token: float = 20.0
    """Of tokens that are not cached; all decoding waits meanwhile."""
    prefix_cache: bool = False
    """Whether a prompt that was computed since the last flush costs nothing."""
    kv_budget_tokens: int = 1 << 40
    """Tokens of prompts and responses that fit in at once; running requests are put back when they outgrow it."""
    median_length: float = 2000.0
    sigma_between: float = 0.6
    """Of the logarithm of lengths, from prompt to prompt."""
    sigma_within: float = 0.6
    """From sample to sample of a prompt."""
    max_length: int = 16_384
    seed: int = 0
    stream_interval: int = 16
    """Tokens between two events of a stream."""

    def __post_init__(self) -> None:
        check_limits(
            (self.num_slots >= 1, f"num_slots = {self.num_slots}: must be at least 1"),
            (
                self.step_ms + self.step_ms_per_request > 0.0 and min(self.step_ms, self.step_ms_per_request) >= 0.0,
                "step_ms, step_ms_per_request: must be at least 0, and one of them above",
            ),
            (self.slow_factor >= 1.0, f"slow_factor = {self.slow_factor}: must be at least 1"),
            (self.fast_batch_size >= 0, f"fast_batch_size = {self.fast_batch_size}: must be at least 0"),
            (self.prefill_us_per_token >= 0.0, f"prefill_us_per_token = {self.prefill_us_per_token}: at least 0"),
            (self.kv_budget_tokens >= 2, f"kv_budget_tokens = {self.kv_budget_tokens}: must be at least 2"),
            (self.median_length >= 1.0, f"median_length = {self.median_length}: must be at least 1"),
            (min(self.sigma_between, self.sigma_within) >= 0.0, "sigma_between, sigma_within: must be at least 0"),
            (
                1 <= self.max_length <= LONGEST_RESPONSE,
                f"max_length = {self.max_length}: must be within 1 and {LONGEST_RESPONSE}",
            ),
            (self.stream_interval >= 1, f"stream_interval = {self.stream_interval}: must be at least 1"),
        )

    def step_seconds(self, num_running: int) -> float:
        """Return how long one decoding step of so many requests takes."""
        seconds = (self.step_ms + self.step_ms_per_request * num_running) / 1e3
        is_slow = 0 < self.fast_batch_size < num_running
        return seconds * self.slow_factor if is_slow else seconds


class FakeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one process fakes: servers and perhaps a router in front of them.

    Raises:
        ConfigError: If a value is outside its range.
    """

    mode: FakeMode = FakeMode.ZERO
    host: str = "127.0.0.1"
    port: int = 0
    """Of the first server; 0 takes free ones."""
    num_workers: int = 1
    """Servers, on consecutive ports; 0 for a router alone."""
    router: RouterDialect | None = None
    """A router on the port after them."""
    worker_urls: list[str] = []
    """Further servers of the router, which run already."""
    policy: str = "least_loaded"
    """How the router chooses: ``least_loaded`` or ``round_robin``."""
    faults: list[ServerFault] = []
    """Of every server, from the start; each server counts for itself."""
    script: list[ScriptedReply] = []
    """Of every server."""
    time_model: TimeModelSettings = TimeModelSettings()
    speed: float = 1.0
    """How fast the engines' clock runs; delays of scripted replies too, but not ``seconds`` of faults."""
    context_length: int = 131_072
    api_key: str | None = None
    """What every request must carry as ``Authorization: Bearer``, the health's and metrics' aside; None lets all in."""
    max_waiting: int | None = None
    """Requests that may wait once all slots are taken; more get 429. None has no limit."""
    keep_requests: int = 1000
    """Bodies of ``/generate`` that are kept for ``GET /requests``; ZERO keeps none."""
    release: Release = Release.V0_5_23
    update_seconds: float = 0.0
    """How long new weights take."""
    abort_on_disconnect: bool = True
    """Whether a client that goes away aborts what it asked for."""
    metrics: bool = False
    """Whether ``/metrics`` is there; a real server has it when asked to."""
    max_new_tokens: int = 128
    """For requests that do not say."""

    def __post_init__(self) -> None:
        last_port = self.port + self.num_workers
        check_limits(
            (
                self.num_workers >= (1 if self.router is None else 0),
                f"num_workers = {self.num_workers}: must be at least 1, or 0 for a router alone",
            ),
            (self.router is not None or not self.worker_urls, "worker_urls: set router to old or new"),
            (self.port >= 0 and last_port <= 65_535, f"port = {self.port}: ports must be within 0 and 65535"),
            (
                self.policy in ("least_loaded", "round_robin"),
                f"policy = {self.policy!r}: must be least_loaded or round_robin",
            ),
            (self.speed > 0.0, f"speed = {self.speed}: must be above 0"),
            (self.context_length >= 2, f"context_length = {self.context_length}: must be at least 2"),
            (self.max_waiting is None or self.max_waiting >= 0, f"max_waiting = {self.max_waiting}: at least 0"),
            (self.keep_requests >= 0, f"keep_requests = {self.keep_requests}: must be at least 0"),
            (self.update_seconds >= 0.0, f"update_seconds = {self.update_seconds}: must be at least 0"),
        )
