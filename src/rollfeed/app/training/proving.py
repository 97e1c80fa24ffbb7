"""The trainer's side of the proof that an engine has its weights."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rollfeed.app.build import PreparedRun
from rollfeed.config.weights import ON_CPU, ON_GPU
from rollfeed.errors import COMPUTING_ERRORS, RunFailedError, in_one_line
from rollfeed.model_files import has_weights, read_headers
from rollfeed.types import PUBLISHED, TrainBatch, WeightProbe

if TYPE_CHECKING:
    from rollfeed.training.probe import Rounding
    from rollfeed.training.trainer import Trainer

_COARSER = {"F64": ("float32", "bfloat16", "float16"), "F32": ("bfloat16", "float16"), "F16": ("bfloat16",)}
"""What a server may hold weights in that are published in another type."""
_NAMES = {"F16": "float16", "BF16": "bfloat16"}
_INT8 = "int8"
_EMBEDDED = {"fp32": PUBLISHED, "bf16": "bfloat16", "int8": _INT8}
"""By the precision of the embedded engine."""


class TrainerProbes:
    """What the trainer says of a few texts of the first batch, version after version."""

    def __init__(self, prepared: PreparedRun, trainer: Trainer) -> None:
        self._settings = prepared.settings
        self._trainer = trainer
        self._types = weight_types(
            prepared.model.checkpoint,
            precision=prepared.engine.precision,
            is_embedded=prepared.settings.engine.is_embedded,
        )
        self._texts: tuple[NDArray[np.int32], ...] = ()

    async def begin(self, batch: TrainBatch) -> WeightProbe | None:
        """Choose the texts, once, and return what is said of them before a batch is trained on; None at later calls."""
        proof = self._settings.weights.proof
        if self._texts or proof.num_texts == 0:
            return None
        # Loaded already, with PyTorch, by the trainer.
        from rollfeed.training.probe import choose_texts

        num_texts = proof.num_texts or (ON_CPU if self._trainer.device.type == "cpu" else ON_GPU)
        self._texts = choose_texts(batch, num_texts=num_texts, num_tokens=proof.num_tokens)
        return await self.take()

    async def take(self) -> WeightProbe | None:
        """Return what the trainer says now; None before there are texts.

        Raises:
            RunFailedError: If it cannot be computed.
        """
        if not self._texts:
            return None
        scoring = asyncio.create_task(asyncio.to_thread(self._score))
        try:
            return await asyncio.shield(scoring)
        except asyncio.CancelledError:
            # Its weights are rounded meanwhile: whoever saves them has to wait.
            await asyncio.wait([scoring])
            if not scoring.cancelled():
                scoring.exception()
            raise

    def _score(self) -> WeightProbe:
        from rollfeed.training.probe import score_texts

        began = time.perf_counter()
        try:
            logprobs = {
                name: score_texts(
                    self._trainer.policy,
                    self._texts,
                    rounding=rounding_of(name),
                    micro_batch_tokens=self._settings.train.micro_batch_tokens,
                )
                for name in self._types
            }
            return WeightProbe(texts=self._texts, logprobs=logprobs, seconds=time.perf_counter() - began)
        except (*COMPUTING_ERRORS, ValueError) as error:
            raise RunFailedError(f"the trainer's log-probabilities cannot be computed: {in_one_line(error)}") from error


def weight_types(checkpoint: Path, *, precision: str, is_embedded: bool) -> tuple[str, ...]:
    """Return how an engine may hold the trainer's weights: ``published``, or as the type that they are rounded to.

    Folders that servers read are in the checkpoint's type, and a server may have been started with a coarser one.

    Args:
        checkpoint: What the policy began as.
        precision: The engine's.
        is_embedded: Whether it is part of this process, and handed the trainer's own weights.
    """
    if is_embedded:
        return (_EMBEDDED[precision],)
    stored = Counter(header.dtype for header in read_headers(checkpoint).values()) if has_weights(checkpoint) else {}
    kind = max(stored, key=lambda name: stored[name], default="F32")
    return (_NAMES.get(kind, PUBLISHED), *_COARSER.get(kind, ()))


def rounding_of(name: str) -> Rounding | None:
    """Return what becomes of weights that are held as a name of :func:`weight_types` says; None where nothing does."""
    import torch

    from rollfeed.engine.native.weights import quantised

    def to_type(module: torch.nn.Module, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(getattr(torch, name)).to(weight.dtype)

    def to_int8(module: torch.nn.Module, weight: torch.Tensor) -> torch.Tensor:
        return quantised(weight) if isinstance(module, torch.nn.Linear) and weight.ndim == 2 else weight

    if name == PUBLISHED:
        return None
    return to_int8 if name == _INT8 else to_type
