"""Continuous batching: every step prefills a bounded piece of new prompts and decodes all that run.

Requests wait in order of arrival, take a slot when one is free, and leave it when they end, while
the others go on. In deterministic mode the shapes a request meets depend on its own tokens only:
prompts are prefilled alone in chunks that start at multiples of a fixed size, decoding computes all
slots every time and each attends alone, and a prefix is reused only if a prefill of exactly the
same prompt left it. Row independence of the matrix products is what :mod:`kernels` provides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from rollfeed.engine.checkpoint import weight_files
from rollfeed.engine.local.architecture import Architecture
from rollfeed.engine.local.kernels import FastKernels, Kernels, choose_fixed_kernels
from rollfeed.engine.local.model import DecodeRows, Model, Pass, Segment
from rollfeed.engine.local.requests import Request
from rollfeed.engine.local.sampling import Sampler
from rollfeed.engine.local.slots import Slots
from rollfeed.engine.local.weights import CheckpointTensors, Weights
from rollfeed.errors import CheckpointError, EngineError, EngineProtocolError
from rollfeed.protocols import Tokenizer
from rollfeed.types import FinishKind, FinishReason

_PREFILL_TOKENS = 128
"""Most prompt tokens computed in one step, so that decoding, commands and closing do not wait for long prompts."""
_ALONE_COST_TOKENS = 128
"""What one more separate attention costs, in positions attended to together with others (CPU)."""


class ContinuousBatcher:
    """The backend that computes Llama-like models itself."""

    policy_version = 0

    def __init__(
        self,
        *,
        checkpoint: Path,
        architecture: Architecture,
        tokenizer: Tokenizer,
        threads: int,
        num_slots: int,
        context_length: int,
        deterministic: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.vocab_size = architecture.vocab_size
        self.precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        self.num_slots = num_slots
        self._checkpoint = checkpoint
        self._architecture = architecture
        self._tokenizer = tokenizer
        self._threads = threads
        self._context_length = context_length
        self._deterministic = deterministic
        self._device = device
        self._dtype = dtype
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        """By slot, in order of admission."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self) -> None:
        torch.set_num_threads(self._threads)
        self._weights = Weights(self._architecture, device=self._device, dtype=self._dtype)
        try:
            self._weights.load(CheckpointTensors(weight_files(self._checkpoint)), complete=True)
        except (EngineProtocolError, SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._checkpoint}: {error}") from error
        kernels: Kernels = FastKernels()
        if self._deterministic:
            kernels = choose_fixed_kernels(self._weights, self._architecture, num_rows=self.num_slots)
        self._model = Model(self._architecture, self._weights, kernels=kernels, context_length=self._context_length)
        self._slots = Slots(
            self._architecture,
            num_slots=self.num_slots,
            capacity=self._context_length,
            device=self._device,
            dtype=self._dtype,
            whole_prompts_only=self._deterministic,
        )
        self._sampler = Sampler(
            num_rows=self.num_slots,
            vocab_size=self.vocab_size,
            device=self._device,
            one_row_at_a_time=self._deterministic,
        )

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

    def update_weights(self, tensors: Mapping[str, Any], policy_version: int) -> None:
        """Replace weights; see :class:`Backend`.

        Requests that have sampled nothing yet start their prompt again with the new weights; the
        others go on, on keys and values of the old ones.
        """
        self._weights.load(tensors)
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
        return self._weights.by_name.get(name)

    @torch.inference_mode()
    def step(self, between_tokens: Callable[[], None]) -> None:
        self._admit()
        prefills = self._plan_prefills()
        ready = [slot for slot in self._running if self._slots.prefill_remaining(slot) <= 0]
        decoding = sorted(slot for slot in ready if self._running[slot].max_new_tokens > 0)
        if prefills or decoding:
            compute = self._compute_fixed if self._deterministic else self._compute_together
            logits_MV = compute(prefills, decoding)
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
        budget = _PREFILL_TOKENS
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
            count = min(remaining, _PREFILL_TOKENS if self._deterministic else budget)
            fits = count <= budget or not prefills
            if count > 0 and fits and not shared:
                prefills.append((slot, count))
                budget -= count
        return prefills

    def _compute_together(self, prefills: Sequence[tuple[int, int]], decoding: Sequence[int]) -> Tensor:
        """Run one pass over all rows; return the logits of the decoding slots."""
        spans = [(slot, self._slots.num_computed(slot), 1) for slot in decoding]
        decode = self._decode_rows(decoding)
        segments = [] if decode is not None else _segments(spans, first_row=0)
        prefill_spans = [(slot, self._slots.num_computed(slot), count) for slot, count in prefills]
        segments += _segments(prefill_spans, first_row=len(decoding))
        hidden_R = self._model.forward(self._pass([*spans, *prefill_spans], decode, segments), self._slots.cache)
        self._score(prefills, hidden_R[len(decoding) :])
        return self._model.logits(hidden_R[: len(decoding)])

    def _compute_fixed(self, prefills: Sequence[tuple[int, int]], decoding: Sequence[int]) -> Tensor:
        """Run one pass a prompt and one over all slots; return the logits of the decoding slots."""
        for slot, count in prefills:
            spans = [(slot, self._slots.num_computed(slot), count)]
            hidden_R = self._model.forward(self._pass(spans, None, _segments(spans, first_row=0)), self._slots.cache)
            self._score([(slot, count)], hidden_R)
        token_ids_N, positions_N = np.zeros(self.num_slots, np.int64), np.zeros(self.num_slots, np.int64)
        segments = []
        for slot in decoding:
            position = self._slots.num_computed(slot)
            positions_N[slot] = position
            token_ids_N[slot] = self._slots.token_ids(slot, position, position + 1)[0]
            segments.append(Segment(start=slot, end=slot + 1, slot=slot, length=position + 1))
        rows = self._tensor(np.array(decoding, np.int64))
        if not decoding:
            return rows
        step = Pass(
            token_ids=self._tensor(token_ids_N),
            positions=self._tensor(positions_N),
            written_rows=rows,
            written_slots=rows,
            written_positions=self._tensor(positions_N)[rows],
            decode=None,
            segments=segments,
        )
        return self._model.logits(self._model.forward(step, self._slots.cache))[rows]

    def _pass(
        self, spans: Sequence[tuple[int, int, int]], decode: DecodeRows | None, segments: Sequence[Segment]
    ) -> Pass:
        """Build a pass over spans of (slot, first position, number of tokens)."""
        token_ids = [self._slots.token_ids(slot, start, start + count) for slot, start, count in spans]
        positions = self._tensor(np.concatenate([np.arange(start, start + count) for _, start, count in spans]))
        return Pass(
            token_ids=self._tensor(np.concatenate(token_ids).astype(np.int64)),
            positions=positions,
            written_rows=None,
            written_slots=self._tensor(np.repeat([slot for slot, _, _ in spans], [count for _, _, count in spans])),
            written_positions=positions,
            decode=decode,
            segments=segments,
        )

    def _decode_rows(self, decoding: Sequence[int]) -> DecodeRows | None:
        """Return how the slots attend together, or None when each alone is cheaper.

        Together, every slot up to the highest costs as much as the longest.
        """
        if not decoding:
            return None
        num_slots = decoding[-1] + 1
        lengths_N = np.ones(num_slots, np.int64)
        lengths_N[decoding] = [self._slots.num_computed(slot) + 1 for slot in decoding]
        length = int(lengths_N.max())
        alone = int(lengths_N[decoding].sum()) + _ALONE_COST_TOKENS * len(decoding)
        if self._device.type == "cpu" and alone < num_slots * length:
            return None
        hidden_NS = np.arange(length) >= lengths_N[:, None]
        mask_NS = np.where(hidden_NS, np.float32(-np.inf), np.float32(0.0))
        return DecodeRows(
            slots=self._tensor(np.array(decoding, np.int64)),
            fills_slots=len(decoding) == num_slots,
            num_slots=num_slots,
            length=length,
            mask=self._tensor(mask_NS)[:, None, None, :].to(self._dtype),
        )

    def _sample(self, logits_MV: Tensor, decoding: Sequence[int]) -> None:
        num_new_tokens = np.array([self._running[slot].num_new_tokens for slot in decoding], np.int64)
        draws = self._sampler.sample(logits_MV, np.array(decoding, np.int64), num_new_tokens)
        for slot, token_id, logprob, finite in zip(decoding, *(column.tolist() for column in draws), strict=True):
            request = self._running[slot]
            if not finite:
                self._fail_not_finite(slot, request)
                continue
            request.append(token_id, logprob, policy_version=self.policy_version)
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
                logits_TV = self._model.logits(hidden_R[row + first - start - 1 : row + count])
                targets_T = self._tensor(self._slots.token_ids(slot, first, end).astype(np.int64))
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

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _segments(spans: Sequence[tuple[int, int, int]], *, first_row: int) -> list[Segment]:
    """Return the rows of spans of (slot, first position, number of tokens), one after the other."""
    segments = []
    for slot, start, count in spans:
        segments.append(Segment(start=first_row, end=first_row + count, slot=slot, length=start + count))
        first_row += count
    return segments
