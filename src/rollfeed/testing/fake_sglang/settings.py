"""Settings of a fake server, its faults among them; all can be given as JSON, so that a process can be told."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from rollfeed.errors import ConfigError

LONGEST_RESPONSE = 26_000
"""The largest ``max_length``: a response carries its length in the id of its first token."""


_Whole = Annotated[int, Meta(ge=0)]
_Some = Annotated[int, Meta(ge=1)]
_NotNegative = Annotated[float, Meta(ge=0.0)]


class _Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings within the limits of their types, also where they are made here and not read."""

    def __post_init__(self) -> None:
        for name, kind in _types(type(self)).items():
            value = getattr(self, name)
            try:
                msgspec.convert(msgspec.to_builtins(value), kind)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{name} = {value!r}: {error}") from None


@functools.cache
def _types(settings: type[_Settings]) -> dict[str, Any]:
    return get_type_hints(settings, include_extras=True)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


class FaultKind(StrEnum):
    """Kinds of faults."""

    REFUSE = "refuse"
    """Stops listening and drops all connections, for ``seconds`` or for good, as soon as it is ordered; with a
    ``path``, as soon as a request meets it."""
    HANG = "hang"
    """Takes the request and never answers."""
    RESET = "reset"
    """Resets the connection after ``fraction`` of the reply's body."""
    TRUNCATED_JSON = "truncated_json"
    """A complete reply whose body ends after ``fraction`` of the JSON."""
    STATUS = "status"
    """An error reply with ``status``."""
    DIE = "die"
    """Ends ``seconds`` after it was ordered, or with a ``path`` after a request met it: the process if it serves
    nothing else, else this server's sockets."""
    DELAY = "delay"
    """Handles the request only after ``seconds``."""
    SLOW_HEALTH = "slow_health"
    """DELAY for ``/health`` and ``/health_generate``."""
    SLOW_ABORT = "slow_abort"
    """Answers ``/abort_request`` at once and aborts after ``seconds``."""
    WRONG_LOGPROB_COUNT = "wrong_logprob_count"
    """One log-probability less than tokens."""
    MISSING_FINISH_REASON = "missing_finish_reason"
    """A reply without ``finish_reason``."""
    STALE_VERSION = "stale_version"
    """A reply with the weight version before the latest change."""
    LIE = "lie"
    """A reply that cannot be the answer, as ``lie`` says."""


class Lie(StrEnum):
    """Replies that cannot be what was asked for."""

    OTHER_TEXT = "other_text"
    """The text of another answer; its tokens are true."""
    NO_TEXT = "no_text"
    """No text; its tokens are true."""
    POSITIVE_LOGPROB = "positive_logprob"
    LOW_LOGPROB = "low_logprob"
    """-1e30."""
    NO_LOGPROB = "no_logprob"
    """null in place of one."""
    NAN_LOGPROB = "nan_logprob"
    """As Python writes it, which is no JSON."""
    OTHER_IDS = "other_ids"
    """Beside the log-probabilities."""
    UNKNOWN_ID = "unknown_id"
    """Over every vocabulary, in both lists."""
    NEGATIVE_ID = "negative_id"
    NESTED_IDS = "nested_ids"
    PROMPT_TOKENS = "prompt_tokens"
    """Says that the prompt had one more."""
    OTHER_REQUEST = "other_request"
    """The id of another one."""
    NEW_VERSION = "new_version"
    """A version that nobody has published."""
    SHORT = "short"
    """One token less than there was room for, and ``length``."""
    LONG = "long"
    """More tokens than were asked for."""
    EMPTY_STOP = "empty_stop"
    """``stop`` without a token."""
    UNMATCHED_STOP = "unmatched_stop"
    """``stop`` at a text that is not there."""
    DEEP_JSON = "deep_json"
    ENDLESS_BODY = "endless_body"
    """Without a length, until the client has had enough."""
    LONG_BODY = "long_body"
    """A length of 2 GiB, and nothing behind it."""
    PROVISIONAL_REPLIES = "provisional_replies"
    """Hundreds of replies with status 100."""
    COMPRESSED_BODY = "compressed_body"
    """64 MiB in 64 KiB, which nobody asked to be compressed."""


_AT_ONCE = (FaultKind.DIE, FaultKind.REFUSE)
_HEALTH_PATHS = ("/health", "/health_generate")
_DEFAULT_PATHS = {FaultKind.SLOW_HEALTH: _HEALTH_PATHS, FaultKind.SLOW_ABORT: ("/abort_request",)}


class ServerFault(_Settings, frozen=True):
    """One thing that goes wrong, with some or all requests."""

    kind: FaultKind
    path: str | None = None
    """Requests to this path only; None is ``/generate``, or what the kind is about. ``*`` is all of them."""
    times: _Some | None = None
    """The next so many requests to the path, then never again; None has no end."""
    skip: _Whole = 0
    """So many requests to the path are spared first."""
    probability: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    """Chance that a request which is not spared meets it, drawn from ``seed``."""
    seed: int = 0
    seconds: _NotNegative | None = None
    """How long, for DELAY, SLOW_*, REFUSE (None is for good), HANG (None is for ever) and DIE (None is now)."""
    status: Annotated[int, Meta(ge=400, le=599)] = 500
    """For STATUS."""
    message: str = "injected fault"
    """For STATUS."""
    fraction: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.5
    """For RESET and TRUNCATED_JSON; 0 resets before the first byte of the reply."""
    lie: Lie | None = None
    """For LIE, which has to have one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check((self.lie is not None) == (self.kind is FaultKind.LIE), "lie: belongs to the kind lie, which has one")

    @property
    def name(self) -> str:
        """The lie, or the kind of another fault."""
        return self.lie or self.kind

    @property
    def needs_no_request(self) -> bool:
        """Whether it happens when it is ordered."""
        return self.kind in _AT_ONCE and self.path is None

    def concerns(self, path: str) -> bool:
        """Say whether requests to ``path`` can meet it."""
        if self.path is not None:
            return self.path in (path, "*")
        if self.kind in _AT_ONCE:
            return False
        return path in _DEFAULT_PATHS.get(self.kind, ("/generate",))


class FaultBook:
    """The faults in force; every request takes at most one, from the oldest that has one for it."""

    def __init__(self, faults: Iterable[ServerFault] = ()) -> None:
        self._entries = [_ScheduledFault(fault) for fault in faults]
        self.fired: Counter[str] = Counter()
        """How many requests have met each kind; lies by their own names."""

    def add(self, fault: ServerFault) -> None:
        """Put a fault in force."""
        self._entries.append(_ScheduledFault(fault))

    def clear(self) -> None:
        """Let nothing go wrong any more."""
        self._entries.clear()

    def in_force(self) -> Sequence[ServerFault]:
        """Return those in force, as they were ordered."""
        return [entry.fault for entry in self._entries]

    def take(self, path: str) -> ServerFault | None:
        """Return the fault that the next request to a path meets."""
        for entry in self._entries:
            if entry.fault.concerns(path) and entry.meets():
                if entry.left == 0:
                    self._entries.remove(entry)
                self.fired[entry.fault.name] += 1
                return entry.fault
        return None

    def take_ordered(self) -> list[ServerFault]:
        """Remove and return the faults that need no request."""
        found = [entry.fault for entry in self._entries if entry.fault.needs_no_request]
        self._entries = [entry for entry in self._entries if not entry.fault.needs_no_request]
        self.fired.update(fault.name for fault in found)
        return found


class _ScheduledFault:
    def __init__(self, fault: ServerFault) -> None:
        self.fault = fault
        self.left = fault.times
        self._skip = fault.skip
        self._random = random.Random(fault.seed)

    def meets(self) -> bool:
        if self._skip > 0:
            self._skip -= 1
            return False
        if self._random.random() >= self.fault.probability:
            return False
        if self.left is not None:
            self.left -= 1
        return True


class FakeMode(StrEnum):
    """Sources of responses and of their times."""

    SCRIPTED = "scripted"
    """From a list, at once or after a while; then as ZERO."""
    ZERO = "zero"
    """All of ``max_new_tokens``, at once, from text prepared beforehand."""
    TIME_MODEL = "time-model"
    """When a continuous-batching engine would be done."""


class Release(StrEnum):
    """Releases of SGLang whose replies and ways are imitated."""

    V0_5_15 = "0.5.15"
    """New weights with ``flush_cache`` while requests are held end the server."""
    V0_5_23 = "0.5.23"
    """They are refused, and are there; replies name the version of every token; a paused server says nothing of its
    health and ends no request."""


class RouterDialect(StrEnum):
    """Ways in which a router lets its workers be listed and changed."""

    OLD = "old"
    """``/list_workers``, ``/add_worker?url=``, ``/remove_worker?url=``."""
    NEW = "new"
    """``GET`` and ``POST /workers``, ``DELETE /workers/{id}``."""


class ScriptedReply(_Settings, frozen=True):
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
    delay_seconds: _NotNegative = 0.0
    num_tokens_when_aborted: _Whole = 0
    """How many of the ids an abort before ``delay_seconds`` finds made."""
    rid_prefix: str = ""
    """For requests whose id starts with it only."""
    status: int = 200
    """Anything else is answered with an error that says ``text``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        num_ids, logprobs, aborted = len(self.output_ids), self.logprobs, self.num_tokens_when_aborted
        _check(
            logprobs is None or len(logprobs) == num_ids, f"logprobs: {len(logprobs or ())} for {num_ids} output_ids"
        )
        reason, named = self.finish_reason, ("stop", "length", "abort")
        _check(
            not isinstance(reason, str) or reason in named,
            f"finish_reason = {reason!r}: must be stop, length, abort or an object",
        )
        _check(aborted <= num_ids, f"num_tokens_when_aborted = {aborted}: there are {num_ids} output_ids")


class TimeModelSettings(_Settings, frozen=True):
    """A continuous-batching engine and the lengths of its responses."""

    num_slots: _Some = 64
    step_ms: _NotNegative = 8.0
    """One decoding step of no requests."""
    step_ms_per_request: _NotNegative = 0.05
    fast_batch_size: _Whole = 0
    """Beyond this many requests a step takes ``slow_factor`` times as long; 0 is no such limit."""
    slow_factor: Annotated[float, Meta(ge=1.0)] = 1.0
    prefill_us_per_token: _NotNegative = 20.0
    """Of tokens that are not cached; all decoding waits meanwhile."""
    prefix_cache: bool = False
    """Whether prompts cost nothing as far as they begin like what was computed since the last flush, prompts and
    responses; those used last are held in what running requests leave of ``kv_budget_tokens``."""
    page_tokens: _Some = 1
    """Prefixes are held in pages of so many tokens."""
    kv_budget_tokens: Annotated[int, Meta(ge=2)] = 1 << 40
    """Tokens of prompts and responses that fit in at once; running requests are put back when they outgrow it."""
    median_length: Annotated[float, Meta(ge=1.0)] = 2000.0
    sigma_between: _NotNegative = 0.6
    """Of the logarithm of lengths, from prompt to prompt."""
    sigma_within: _NotNegative = 0.6
    """From sample to sample of a prompt."""
    max_length: Annotated[int, Meta(ge=1, le=LONGEST_RESPONSE)] = 16_384
    seed: int = 0
    stream_interval: _Some = 16
    """Tokens between two events of a stream."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(
            self.step_ms + self.step_ms_per_request > 0.0, "step_ms, step_ms_per_request: one of them must be above 0"
        )

    def step_seconds(self, num_running: int) -> float:
        """Return how long one decoding step of so many requests takes."""
        seconds = (self.step_ms + self.step_ms_per_request * num_running) / 1e3
        is_slow = 0 < self.fast_batch_size < num_running
        return seconds * self.slow_factor if is_slow else seconds


class FakeSettings(_Settings, frozen=True):
    """Settings of one process: servers and perhaps a router in front of them."""

    mode: FakeMode = FakeMode.ZERO
    host: str = "127.0.0.1"
    port: _Whole = 0
    """Of the first server; 0 takes free ones."""
    num_workers: _Whole = 1
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
    speed: Annotated[float, Meta(gt=0.0)] = 1.0
    """How fast the engines' clock runs; delays of scripted replies too, but not ``seconds`` of faults."""
    context_length: Annotated[int, Meta(ge=2)] = 131_072
    api_key: str | None = None
    """What every request must carry as ``Authorization: Bearer``, the health's and metrics' aside; None lets all in."""
    max_waiting: _Whole | None = None
    """Requests that may wait once all slots are taken; more get 429. None has no limit."""
    keep_requests: _Whole = 1000
    """Bodies of ``/generate`` that are kept for ``GET /requests``; ZERO keeps none."""
    vocab_size: Annotated[int, Meta(ge=2)] | None = None
    """Ids of made-up tokens are below it, for models with few tokens; None takes 1000 to 20000. Not of TIME_MODEL."""
    release: Release = Release.V0_5_23
    update_seconds: _NotNegative = 0.0
    """How long new weights take."""
    abort_on_disconnect: bool = True
    """Whether a client that goes away aborts what it asked for."""
    metrics: bool = False
    """Whether ``/metrics`` is there; a real server has it when asked to."""
    max_new_tokens: int = 128
    """For requests that do not say."""

    def __post_init__(self) -> None:
        super().__post_init__()
        alone = f"num_workers = {self.num_workers}: must be at least 1, or 0 for a router alone"
        _check(self.num_workers >= 1 or self.router is not None, alone)
        _check(
            self.vocab_size is None or self.mode is not FakeMode.TIME_MODEL,
            f"vocab_size = {self.vocab_size}: the time model needs ids of its own; use the mode zero",
        )
        policies = f"policy = {self.policy!r}: must be least_loaded or round_robin"
        _check(self.policy in ("least_loaded", "round_robin"), policies)
        _check(self.router is not None or not self.worker_urls, "worker_urls: set router to old or new")
        _check(self.port + self.num_workers <= 65_535, f"port = {self.port}: ports must be within 0 and 65535")
