"""Continuous batching: every step prefills a bounded piece of new prompts and decodes all that run.

Requests wait in order of arrival, take a slot when one is free, and leave it when they end, while
the others go on. What computes the rows of a step is a :class:`Runner`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from rollfeed.engine.backends.backend import Backend, request_failed
from rollfeed.engine.backends.replacement import CheckpointTensors
from rollfeed.engine.backends.sampling import Sampler
from rollfeed.engine.backends.slots import Slots
from rollfeed.errors import CheckpointError, EngineProtocolError
from rollfeed.types import FinishKind, FinishReason

PREFILL_TOKENS = 128
"""Most prompt tokens computed in one step, so that decoding, commands and closing do not wait for long prompts."""


class Runner(ABC):
    """Computes steps of a model over the tokens of its slots; every call comes from the engine's thread."""

    threads: int
    slots: Slots
    sampler: Sampler
    whole_chunks = False
    """Whether a prompt's chunks may not be cut shorter because of other prompts, since that changes bits."""

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all weights, by Hugging Face name."""

    @abstractmethod
    def load(self, tensors: Mapping[str, Any], *, complete: bool = False) -> None:
        """Replace weights by Hugging Face name; see :func:`rollfeed.engine.backends.replacement.check_replacement`."""

    @abstractmethod
    def weight(self, name: str) -> Tensor | None:
        """Return a weight; None if there is none of this name."""

    @abstractmethod
    def compute(self, prefills: Sequence[tuple[int, int]], decoding: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Write the next keys and values of slots.

        Args:
            prefills: (slot, how many prompt tokens to compute).
            decoding: Slots whose newest token is computed.

        Returns:
            Logits of the decoding slots ``(M, vocabulary)``, and the hidden states of all prefilled
            tokens ``(R, hidden)`` for :meth:`logits`.
        """

    @abstractmethod
    def logits(self, hidden_R: Tensor) -> Tensor:
        """Return float32 logits of hidden states."""

    def take_milliseconds(self) -> Mapping[str, float]:
        """Return the time spent in each part of the computation since the last call, as far as it is known."""
        return {}

    def close(self) -> None:  # noqa: B027 - torch frees what nobody refers to
        """Free the memory; nothing is called afterwards."""


class ContinuousBatcher(Backend):
    """Computes Llama-like models itself.

    ``make_runner`` makes what computes the rows of a step, on the engine's thread.
    """

    def __init__(self, make_runner: Callable[[], Runner], **options: Any) -> None:
        super().__init__(**options)
        self._make_runner = make_runner
        self._num_steps = 0
        self._step_seconds = 0.0

    def start(self) -> None:
        self._runner = self._make_runner()
        self._slots, self._sampler = self._runner.slots, self._runner.sampler
        try:
            self._load(CheckpointTensors(self._checkpoint, self.shapes), complete=True)
        except (EngineProtocolError, SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._checkpoint}: {error}") from error

    def close(self) -> None:
        self._runner.close()

    @property
    def threads(self) -> int:
        return self._runner.threads

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._runner.shapes

    def weight(self, name: str) -> Tensor | None:
        return self._runner.weight(name)

    def _load(self, tensors: Mapping[str, Any], *, complete: bool = False) -> None:
        self._runner.load(tensors, complete=complete)

    def update_weights(self, tensors: Mapping[str, Any], policy_version: int, *, skip_unknown: bool = False) -> None:
        """Replace weights; see :class:`Backend`.

        Requests that have sampled nothing yet start their prompt again with the new weights; the
        others go on, on keys and values of the old ones.
        """
        super().update_weights(tensors, policy_version, skip_unknown=skip_unknown)
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
            if any(self._running[slot].needs_scoring for slot, _ in prefills):
                # What scores are computed from may be written over these.
                logits_MV = logits_MV.clone()
                self._score(prefills, hidden_R)
            for slot, count in [*prefills, *((slot, 1) for slot in decoding)]:
                self._slots.advance(slot, count)
            if decoding:
                self._sample(logits_MV, decoding)
        self._finish_scored()

    def _admit(self) -> None:
        while self._waiting and self._slots.has_free():
            request = self._waiting.popleft()
            token_ids = request.all_token_ids
            slot, kept = self._slots.occupy(token_ids, reuse=not request.needs_scoring)
            try:
                self._sampler.assign(
                    slot,
                    request.params,
                    seed=request.seed,
                    prompt_ids=token_ids,
                    stop_ids=request.stop_ids,
                    num_tops=request.num_tops,
                )
            except Exception as error:  # the request's: whatever it asks for must not end the others
                self._slots.erase(slot)
                request.fail(request_failed(request, error))
                continue
            if request.num_new_tokens == 0:
                request.cached_tokens = kept
            self._running[slot] = request
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
        for slot, token_id in zip(decoding, draws.token_ids.tolist(), strict=True):
            self._slots.append(slot, self._running[slot].num_tokens, token_id)
        self._take(decoding, draws)

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
                scaled_TV = logits_TV / request.score_temperature
                logprobs_T = scaled_TV.log_softmax(dim=-1).gather(1, targets_T[:, None])[:, 0]
                request.prompt_logprobs[first:end] = logprobs_T.cpu().numpy()
            row += count

    def _finish_scored(self) -> None:
        """Answer requests that ask for nothing but the scores of their prompt."""
        for slot, request in list(self._running.items()):
            if request.max_new_tokens > 0 or self._slots.prefill_remaining(slot) > 0:
                continue
            if np.isfinite(request.prompt_logprobs[(request.score_from or 0) + 1 :]).all():
                self._leave(slot)
                self._answer(request, FinishReason(FinishKind.LENGTH))
            else:
                self._fail_not_finite(slot)

    def _leave(self, slot: int, *, spoilt: bool = False) -> None:
        super()._leave(slot)
        (self._slots.erase if spoilt else self._slots.release)(slot)
