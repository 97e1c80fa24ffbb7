"""Backends compute: they hold the requests of an engine, and answer each of them exactly once.

Invariant: what goes wrong with one request, when it is let in or answered, fails that request only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rollfeed.engine.backends.replacement import load_known
from rollfeed.engine.backends.requests import Request
from rollfeed.engine.backends.sampling import Draws
from rollfeed.errors import EngineError, in_one_line
from rollfeed.model_files import tell_of_unknown
from rollfeed.protocols import Tokenizer
from rollfeed.types import FinishKind, FinishReason

ABORTED = FinishReason(FinishKind.ABORT)


class Backend(ABC):
    """Takes requests and answers them, step by step.

    Its methods are called on the engine's thread only; its numbers are read from others.

    ``vocab_size`` is 0 while it is not known.
    """

    policy_version = 0

    def __init__(
        self, *, checkpoint: Path, tokenizer: Tokenizer, precision: str, vocab_size: int, num_slots: int
    ) -> None:
        self.precision = precision
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self._checkpoint = checkpoint
        self._tokenizer = tokenizer
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        """By slot, in order of admission."""

    @abstractmethod
    def start(self) -> None:
        """Load the weights. Raises CheckpointError if they do not fit the model."""

    def close(self) -> None:  # noqa: B027 - torch frees what nobody refers to
        """Free what :meth:`start` took; the last call, and only after a start that succeeded."""

    @abstractmethod
    def step(self, between_tokens: Callable[[], None]) -> None:
        """Sample the next token of everything that runs, and answer what has finished.

        A step of more than one token calls ``between_tokens`` between them: commands are carried
        out there, and :class:`EngineClosing` is raised there to end the step.
        """

    def retract(self) -> None:  # noqa: B027 - where what has begun cannot be put back, it stays
        """Put what runs back to the front of those that wait, with its tokens but without its keys and values."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """CPU threads it computes with; known after :meth:`start`."""

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all weights, by the checkpoint's names."""

    @abstractmethod
    def weight(self, name: str) -> Tensor | None:
        """Return the tensor of a checkpoint's name, which updates write to; None if there is none."""

    def take_step_milliseconds(self) -> Mapping[str, float]:
        """Return the mean time of a step since the last call: its parts, as far as they are known, and ``whole``."""
        return {}

    @abstractmethod
    def _load(self, tensors: Mapping[str, Any], *, complete: bool = False) -> None:
        """Replace weights by the checkpoint's names, all of those named or none; with ``complete``, all there are."""

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        """Requests being worked on, without those that wait."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Take a request; it waits, first come first served, until there is room."""
        self._waiting.append(request)

    def abort(self, chosen: Callable[[Request], bool]) -> None:
        """Answer the chosen requests with what they have."""
        for request in [request for request in self._waiting if chosen(request)]:
            self._waiting.remove(request)
            self._answer(request, ABORTED)
        for slot, request in [(slot, request) for slot, request in self._running.items() if chosen(request)]:
            self._leave(slot)
            self._answer(request, ABORTED)

    def fail_all(self, failure: Callable[[], EngineError]) -> None:
        """Answer all requests with an error, a new one each."""
        for request in (*self._running.values(), *self._waiting):
            request.fail(failure())
        self._running.clear()
        self._waiting.clear()

    def update_weights(self, tensors: Mapping[str, Any], policy_version: int, *, skip_unknown: bool = False) -> None:
        """Replace weights, all of the named ones or none.

        Tensors go by the checkpoint's names. With ``skip_unknown``, those that the model does not have are passed over
        with a warning, if all of its own are there.

        Raises:
            EngineProtocolError: If they do not fit.
        """
        unknown = tensors.keys() - self.shapes.keys() if skip_unknown else set()
        load_known(self._load, tensors, unknown=unknown)
        tell_of_unknown(self._checkpoint, unknown)
        self.policy_version = policy_version

    def _take(self, slots: Sequence[int], draws: Draws) -> None:
        """Give the requests of some slots a token each, and answer those that end with it."""
        columns = (column.tolist() for column in draws[:3])
        for row, (slot, token_id, logprob, finite) in enumerate(zip(slots, *columns, strict=True)):
            request = self._running[slot]
            if not finite:
                self._fail_not_finite(slot)
                continue
            kept = draws.kept[row] if draws.kept else None
            tops = draws.tops[row] if draws.tops else ()
            request.append(token_id, logprob, policy_version=self.policy_version, kept=kept, tops=tops)
            try:
                reason = request.finish_reason(self._tokenizer)
            except Exception as error:  # of the tokenizer
                self._leave(slot)
                request.fail(request_failed(request, error))
                continue
            if reason is None:
                request.publish()
            else:
                self._leave(slot)
                self._answer(request, reason)

    def _answer(self, request: Request, reason: FinishReason) -> None:
        try:
            request.finish(reason, self._tokenizer, precision=self.precision)
        except Exception as error:  # of the tokenizer
            request.fail(request_failed(request, error))

    def _fail_not_finite(self, slot: int) -> None:
        request = self._running[slot]
        what = f"the model's output is not finite (policy version {self.policy_version})"
        request.fail(EngineError(f"request {request.request_id}: {what}"))
        self._leave(slot, spoilt=True)

    def _leave(self, slot: int, *, spoilt: bool = False) -> None:
        """Free a slot; ``spoilt`` says that its keys and values are no numbers any more."""
        del spoilt
        del self._running[slot]


def request_failed(request: Request, error: Exception) -> EngineError:
    """Return the error of a request that could not be let in or answered."""
    failure = EngineError(f"request {request.request_id}: {in_one_line(error)}")
    failure.__cause__ = error
    return failure
