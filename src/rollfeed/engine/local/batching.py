"""Continuous batching: every step prefills a bounded piece of new prompts and decodes all that run.

Requests wait in order of arrival, take a slot when one is free, and leave it when they end, while
the others go on. What computes the rows of a step is a :class:`Runner`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from rollfeed.engine.local.requests import Request
from rollfeed.engine.local.sampling import Sampler
from rollfeed.engine.local.slots import Slots
from rollfeed.engine.local.weights import CheckpointTensors, load_known
from rollfeed.errors import CheckpointError, EngineError, EngineProtocolError
from rollfeed.model_files import tell_of_unknown
from rollfeed.protocols import Tokenizer
from rollfeed.types import FinishKind, FinishReason

PREFILL_TOKENS = 128
"""Most prompt tokens computed in one step, so that decoding, commands and closing do not wait for long prompts."""


class Runner(Protocol):
    """Computes steps of a model over the tokens of its slots; every call comes from the engine's thread."""

    threads: int
    slots: Slots
    sampler: Sampler
    whole_chunks: bool
    """Whether a prompt's chunks may not be cut shorter because of other prompts, since that changes bits."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of all weights, by Hugging Face name."""

    def load(self, tensors: Mapping[str, Any], *, complete: bool = False) -> None:
        """Replace weights by Hugging Face name, all of them or none.

        Raises:
            EngineProtocolError: If they do not fit the model.
        """

    def weight(self, name: str) -> Tensor | None:
        """Return a weight; None if there is none of this name."""

    def compute(self, prefills: Sequence[tuple[int, int]], decoding: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Write the next keys and values of slots.

        Args:
            prefills: (slot, how many prompt tokens to compute).
            decoding: Slots whose newest token is computed.

        Returns:
            Logits of the decoding slots ``(M, vocabulary)``, and the hidden states of all prefilled
            tokens ``(R, hidden)`` for :meth:`logits`.
        """

    def logits(self, hidden_R: Tensor) -> Tensor:
        """Return float32 logits of hidden states."""

    def take_milliseconds(self) -> Mapping[str, float]:
        """Return the time spent in each part of the computation since the last call, as far as it is known."""

    def close(self) -> None:
        """Free the memory; nothing is called afterwards."""


class ContinuousBatcher:
    """The backend that computes Llama-like models itself."""

    policy_version = 0

    def __init__(
        self,
        *,
        checkpoint: Path,
        make_runner: Callable[[], Runner],
        tokenizer: Tokenizer,
        precision: str,
        vocab_size: int,
        num_slots: int,
    ) -> None:
        self.vocab_size = vocab_size
        self.precision = precision
        self.num_slots = num_slots
        self._checkpoint = checkpoint
        self._make_runner = make_runner
        self._tokenizer = tokenizer
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        """By slot, in order of admission."""
        self._num_steps = 0
        self._step_seconds = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def threads(self) -> int:
        return self._runner.threads

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self) -> None:
        self._runner = self._make_runner()
        self._slots, self._sampler = self._runner.slots, self._runner.sampler
        try:
            self._runner.load(CheckpointTensors(self._checkpoint, self._runner.shapes), complete=True)
        except (EngineProtocolError, SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._checkpoint}: {error}") from error

    def close(self) -> None:
        self._runner.close()

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def abort(self, chosen: Callable[[Request], bool]) -> None:
        for request in [request for request in self._waiting if chosen(request)]:
            self._finish(request, FinishReason(FinishKind.ABORT))
            self._waiting.remove(request)
        for slot, request in [(slot, request) for slot, request in self._running.items() if chosen(request)]:
            self._finish(request, FinishReason(FinishKind.ABORT))
            self._leave(slot)

    def fail_all(self, failure: Callable[[], EngineError]) -> None:
        for request in (*self._running.values(), *self._waiting):
            request.fail(failure())
        self._running.clear()
        self._waiting.clear()

    def update_weights(self, tensors: Mapping[str, Any], policy_version: int, *, skip_unknown: bool = False) -> None:
        """Replace weights; see :class:`Backend`.

        Requests that have sampled nothing yet start their prompt again with the new weights; the
        others go on, on keys and values of the old ones.
        """
        unknown = tensors.keys() - self._runner.shapes.keys() if skip_unknown else set()
        load_known(self._runner.load, tensors, unknown=unknown)
        tell_of_unknown(self._checkpoint, unknown)
        self.policy_version = policy_version
        self._slots.invalidate()
        for request in self._running.values():
            if request.num_new_tokens == 0:
                request.cached_tokens = 0

    def retract(self) -> None:
        for slot, request in reversed(self._running.items()):
            self._slots.release(slot)
            request.num_retractions += 1
            self._waiting.appendleft(request)
        self._running.clear()

    def weight(self, name: str) -> Tensor | None:
        return self._runner.weight(name)

    def take_step_milliseconds(self) -> Mapping[str, float]:
        parts = self._runner.take_milliseconds()
        steps, whole = max(1, self._num_steps), 1e3 * self._step_seconds
        self._num_steps, self._step_seconds = 0, 0.0
        shares = {part: milliseconds / steps for part, milliseconds in parts.items()}
        return {**shares, "scheduling": (whole - sum(parts.values())) / steps, "whole": whole / steps}

    @torch.inference_mode()
    def step(self, between_tokens: Callable[[], None]) -> None:
        started = time.perf_counter()
        self._step()
        self._num_steps += 1
        self._step_seconds += time.perf_counter() - started

    def _step(self) -> None:
        self._admit()
        prefills = self._plan_prefills()
        ready = [slot for slot in self._running if self._slots.prefill_remaining(slot) <= 0]
        decoding = sorted(slot for slot in ready if self._running[slot].max_new_tokens > 0)
        if prefills or decoding:
            logits_MV, hidden_R = self._runner.compute(prefills, decoding)
            self._score(prefills, hidden_R)
            for slot, count in [*prefills, *((slot, 1) for slot in decoding)]:
                self._slots.advance(slot, count)
            if decoding:
                self._sample(logits_MV, decoding)
        self._finish_scored()

    def _admit(self) -> None:
        while self._waiting and self._slots.has_free():
            request = self._waiting[0]
            token_ids = request.all_token_ids
            slot, kept = self._slots.occupy(token_ids, reuse=not request.needs_scoring)
            if request.num_new_tokens == 0:
                request.cached_tokens = kept
            self._running[slot] = self._waiting.popleft()
            self._sampler.assign(
                slot, request.params, seed=request.seed, prompt_ids=token_ids, stop_ids=request.stop_ids
            )
            request.start()

    def _plan_prefills(self) -> list[tuple[int, int]]:
        """Return (slot, how many prompt tokens to compute now), after copying what can be copied.

        A prompt waits while an earlier one is about to compute tokens that both begin with.
        """
        prefills: list[tuple[int, int]] = []
        unfinished: list[int] = []
        budget = PREFILL_TOKENS
        for slot, request in self._running.items():
            if self._slots.prefill_remaining(slot) <= 0:
                continue
            # What is copied has no hidden states, and those are what a prompt is scored by.
            if not request.needs_scoring:
                copied = self._slots.copy_longest_prefix(slot)
                request.cached_tokens += copied if request.num_new_tokens == 0 else 0
            remaining = self._slots.prefill_remaining(slot)
            if remaining == 0:
                continue
            shared = not request.needs_scoring and any(
                self._slots.shares_unfinished_prefill(slot, earlier) for earlier in unfinished
            )
            unfinished.append(slot)
            count = min(remaining, PREFILL_TOKENS if self._runner.whole_chunks else budget)
            fits = count <= budget or not prefills
            if count > 0 and fits and not shared:
                prefills.append((slot, count))
                budget -= count
        return prefills

    def _sample(self, logits_MV: Tensor, decoding: Sequence[int]) -> None:
        num_new_tokens = np.array([self._running[slot].num_new_tokens for slot in decoding], np.int64)
        draws = self._sampler.sample(logits_MV, np.array(decoding, np.int64), num_new_tokens)
        columns = (column.tolist() for column in draws[:3])
        for row, (slot, token_id, logprob, finite) in enumerate(zip(decoding, *columns, strict=True)):
            request = self._running[slot]
            if not finite:
                self._fail_not_finite(slot, request)
                continue
            kept = draws.kept[row] if draws.kept else None
            request.append(token_id, logprob, policy_version=self.policy_version, kept=kept)
            self._slots.append(slot, request.num_tokens - 1, token_id)
            reason = request.finish_reason(self._tokenizer)
            if reason is None:
                request.publish()
            else:
                self._finish(request, reason)
                self._leave(slot)

    def _score(self, prefills: Sequence[tuple[int, int]], hidden_R: Tensor) -> None:
        """Give requests that ask for it the log-probabilities of prompt tokens; call it before the slots advance."""
        row = 0
        for slot, count in prefills:
            request, start = self._running[slot], self._slots.num_computed(slot)
            if request.needs_scoring and request.score_from is not None:
                end = start + count + 1
                first = min(max(start, request.score_from) + 1, end)
                logits_TV = self._runner.logits(hidden_R[row + first - start - 1 : row + count])
                targets_T = torch.as_tensor(
                    self._slots.token_ids(slot, first, end).astype(np.int64), device=hidden_R.device
                )
                logprobs_T = logits_TV.log_softmax(dim=-1).gather(1, targets_T[:, None])[:, 0]
                request.prompt_logprobs[first:end] = logprobs_T.cpu().numpy()
            row += count

    def _finish_scored(self) -> None:
        """Answer requests that ask for nothing but the scores of their prompt."""
        for slot, request in list(self._running.items()):
            if request.max_new_tokens > 0 or self._slots.prefill_remaining(slot) > 0:
                continue
            if np.isfinite(request.prompt_logprobs[(request.score_from or 0) + 1 :]).all():
                self._finish(request, FinishReason(FinishKind.LENGTH))
                self._leave(slot)
            else:
                self._fail_not_finite(slot, request)

    def _fail_not_finite(self, slot: int, request: Request) -> None:
        request.fail(
            EngineError(
                f"request {request.request_id}: the model's output is not finite (policy version {self.policy_version})"
            )
        )
        del self._running[slot]
        self._slots.erase(slot)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish(reason, self._tokenizer, precision=self.precision)

    def _leave(self, slot: int) -> None:
        del self._running[slot]
        self._slots.release(slot)
