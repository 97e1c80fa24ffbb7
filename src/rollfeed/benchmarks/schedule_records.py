"""What a run is seen to do from outside: its requests at the engine, and what it commits."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollfeed.engine.sglang import SGLangEngine
from rollfeed.types import Completion, FinishKind, Group, Sample, SamplingParams, StepCommit

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


class RecordingEngine(SGLangEngine):
    """The SGLang client; remembers what it was asked for."""

    def __init__(self, *args: Any, prompt_tokens: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompt_tokens = prompt_tokens
        self.records: defaultdict[PromptKey, list[RequestRecord]] = defaultdict(list)
        self.sampling_seeds: defaultdict[PromptKey, list[int]] = defaultdict(list)
        """As servers get them, of the requests that begin a response: they fix its length."""
        self.update_times: list[float] = []

    async def generate(
        self, token_ids: NDArray[np.int32], params: SamplingParams, *, request_id: str, images: Sequence[str] = ()
    ) -> Completion:
        """As :meth:`SGLangEngine.generate`."""
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
    """What became of a prompt."""

    step: int
    """That decided it."""
    dropped_as: str | None
    """None: it was trained on."""
    lengths: tuple[int, ...]
    """Of its responses."""

    @property
    def is_trained(self) -> bool:
        return self.dropped_as is None


class CommitLog:
    """What all steps so far have committed."""

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
    return Fate(step=step, dropped_as=reason, lengths=tuple(each.response_tokens for each in group.rollouts))


def _ages(samples: Sequence[Sample], policy_version: int) -> Iterator[int]:
    for sample in samples:
        if sample.oldest_version is not None:
            yield policy_version - sample.oldest_version
