"""The log-probabilities that the trainer's weights, as an engine may hold them, give to a few texts.

An engine has the weights in the type that they are published in, or in a coarser one of its own. At small learning
rates an update is smaller than the steps of such a type: most weights then stay as they are, in an engine that has
taken the update as in one that has not. So the trainer scores the texts with its weights rounded in the same way. It
computes in fp32: passes in bf16 round each weight and sum anew after an update, and what that does to a text (0.035
nats a token of a small model on a GPU after one update at 1e-5) is larger than the update, and another in each program.

Axes: N tokens that have a log-probability: of each text all but the first, text after text.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollfeed.base.waiting import until_done
from rollfeed.config.weights import ON_CPU, ON_GPU, ProofSettings
from rollfeed.errors import COMPUTING_ERRORS, RunFailedError, in_one_line
from rollfeed.model_files import has_weights, read_headers
from rollfeed.model_files.low_rank import adapted_layers, merged, without_adapter
from rollfeed.model_files.seeing import placeholder_ids
from rollfeed.training.model import Policy
from rollfeed.training.packing import TrainSequence, pack_sequences
from rollfeed.types import PUBLISHED, TrainBatch, WeightProbe

if TYPE_CHECKING:
    from rollfeed.training.trainer import Trainer

Rounding = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
"""Returns a module's weight as an engine holds it, in the type of the trainer's."""


_COARSER = {"F64": ("float32", "bfloat16", "float16"), "F32": ("bfloat16", "float16"), "F16": ("bfloat16",)}
"""What a server may hold weights in that are published in another type."""
_NAMES = {"F16": "float16", "BF16": "bfloat16"}
_INT8 = "int8"
FP8 = "fp8"
"""As servers of a checkpoint in FP8 hold them."""
_EMBEDDED = {"fp32": PUBLISHED, "bf16": "bfloat16", "int8": _INT8}
"""By the precision of the embedded engine."""


def choose_texts(
    batch: TrainBatch, *, num_texts: int, num_tokens: int, left_out: Sequence[int] = ()
) -> tuple[NDArray[np.int32], ...]:
    """Return the ends of prompts with the beginnings of their answers, where training changes the policy most.

    They are of different groups as far as there are some, and begin with the first token of their sample, which some
    models cannot do without.

    At most ``num_texts``, of at most ``num_tokens`` each; tokens that stand for pictures are ``left_out``, since texts
    are scored without any.
    """
    samples = [sample for group in batch.groups for rollout in group.rollouts[:1] for sample in rollout.samples[:1]]
    samples += [sample for sample in batch.samples if all(sample is not other for other in samples)]
    texts: list[NDArray[np.int32]] = []
    for sample in samples:
        start = max(1, min(sample.prompt_length - num_tokens // 2, len(sample.token_ids) - num_tokens + 1))
        text = np.concatenate([sample.token_ids[:1], sample.token_ids[start : start + num_tokens - 1]])
        text = text[~np.isin(text, left_out)]
        if len(text) > 1 and not any(np.array_equal(text, other) for other in texts):
            texts.append(text)
        if len(texts) == num_texts:
            break
    return tuple(texts)


def score_texts(
    policy: Policy,
    texts: Sequence[NDArray[np.int32]],
    *,
    rounding: Rounding | None,
    micro_batch_tokens: int,
    merges: bool = True,
) -> NDArray[np.float64]:
    """Return the log-probabilities of all tokens but the first of each text, before any temperature, ``(N,)``.

    Each has at least two tokens. ``rounding`` is what becomes of the weights in the engine; at most
    ``micro_batch_tokens`` places are computed at once, or those of one text. ``merges`` says whether an adapter is
    added to the weights before they are rounded.
    """
    sequences = [TrainSequence.of_tokens(text, prompt_length=1, number=number) for number, text in enumerate(texts)]
    micro_batches = pack_sequences(
        sequences,
        [sequence.mask_T for sequence in sequences],
        micro_batch_tokens=max(micro_batch_tokens, *(len(text) for text in texts)),
        share_prompts=False,
    )
    with _rounded(policy.model, rounding, merges=merges):
        found = policy.score_each(micro_batches, temperature=1.0, exact=True)
    return np.concatenate([found[number].logprobs_T.double().numpy() for number in range(len(texts))])


@contextmanager
def _rounded(model: Any, rounding: Rounding | None, *, merges: bool) -> Iterator[None]:
    """Have each module compute with its own weights rounded, one module at a time: there is no second model."""
    if rounding is None:
        if all(each.dtype is not torch.bfloat16 for each in model.parameters()):
            yield
            return
        merges, rounding = False, lambda module, weight: weight  # beside an adapter they are held as passes compute
    kept: dict[Any, list[tuple[Any, torch.Tensor]]] = {}
    adapted = {layer.base_layer: layer for layer in adapted_layers(model) if merges}

    def round_weights(module: Any, inputs: Any) -> None:
        own = [each for each in module.parameters(recurse=False) if each.is_floating_point()]
        kept[module] = [(parameter, parameter.data) for parameter in own]
        for parameter, held in kept[module]:
            is_adapted, exact = module in adapted and parameter is module.weight, held.float()
            parameter.data = rounding(module, merged(adapted[module], exact) if is_adapted else exact)

    def restore(module: Any, inputs: Any, output: Any) -> None:
        for parameter, exact in kept.pop(module):
            parameter.data = exact

    hooks = []
    try:
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                hooks.append(module.register_forward_pre_hook(round_weights))
                hooks.append(module.register_forward_hook(restore, always_call=True))
        with without_adapter(model) if merges else nullcontext():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameters in kept.values():
            for parameter, exact in parameters:
                parameter.data = exact


class TrainerProbes:
    """Scores of a few texts of the first batch by the trainer, version after version.

    ``types`` are how an engine may hold the weights (:func:`weight_types`); ``to_int8`` returns a matrix as the
    embedded engine holds it in 8 bits, and ``to_fp8`` the tensor of a name as servers of a checkpoint in FP8 do;
    ``merges`` says whether an adapter is published merged.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        settings: ProofSettings,
        types: Sequence[str],
        micro_batch_tokens: int,
        to_int8: Callable[[torch.Tensor], torch.Tensor],
        to_fp8: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
        merges: bool = True,
    ) -> None:
        self._trainer = trainer
        self._settings = settings
        self._types = types
        self._micro_batch_tokens = micro_batch_tokens
        self._to_int8 = to_int8
        self._to_fp8 = to_fp8
        self._merges = merges
        self._texts: tuple[NDArray[np.int32], ...] = ()

    async def begin(self, batch: TrainBatch) -> WeightProbe | None:
        """Choose the texts, once, and return what is said of them before a batch is trained on; None at later calls."""
        proof = self._settings
        if self._texts or proof.num_texts == 0:
            return None
        num_texts = proof.num_texts or (ON_CPU if self._trainer.device.type == "cpu" else ON_GPU)
        placeholders = placeholder_ids(self._trainer.policy.model.config)
        self._texts = choose_texts(batch, num_texts=num_texts, num_tokens=proof.num_tokens, left_out=placeholders)
        return await self.take()

    async def take(self) -> WeightProbe | None:
        """Return what the trainer says now; None before there are texts.

        Raises:
            RunFailedError: If it cannot be computed.
        """
        if not self._texts:
            return None
        # The weights are rounded meanwhile: whoever saves them has to wait.
        return await until_done(asyncio.create_task(asyncio.to_thread(self._score)))

    def _score(self) -> WeightProbe:
        began = time.perf_counter()
        try:
            logprobs = {
                name: score_texts(
                    self._trainer.exact_policy,
                    self._texts,
                    rounding=self._rounding(name),
                    micro_batch_tokens=self._micro_batch_tokens,
                    merges=self._merges,
                )
                for name in self._types
            }
            return WeightProbe(texts=self._texts, logprobs=logprobs, seconds=time.perf_counter() - began)
        except (*COMPUTING_ERRORS, ValueError) as error:
            raise RunFailedError(f"the trainer's log-probabilities cannot be computed: {in_one_line(error)}") from error

    def _rounding(self, name: str) -> Rounding | None:
        if name == FP8 and self._to_fp8 is not None:
            return rounding_by_name(self._trainer.weights(), self._to_fp8)
        return rounding_of(name, to_int8=self._to_int8)


def weight_types(checkpoint: Path, *, precision: str, is_embedded: bool) -> tuple[str, ...]:
    """Return how an engine may hold the trainer's weights: ``published``, or as the type that they are rounded to.

    What servers are given is in the checkpoint's type, and a server may have been started with a coarser one.

    ``is_embedded`` says whether the engine is part of this process, and handed the trainer's own weights.
    """
    if is_embedded:
        return (_EMBEDDED[precision],)
    stored = Counter(header.dtype for header in read_headers(checkpoint).values()) if has_weights(checkpoint) else {}
    if "F8_E4M3" in stored:
        return (FP8,)
    kind = max(stored, key=lambda name: stored[name], default="F32")
    return (_NAMES.get(kind, PUBLISHED), *_COARSER.get(kind, ()))


def rounding_by_name(
    weights: Mapping[str, torch.Tensor], rounded: Callable[[str, torch.Tensor], torch.Tensor]
) -> Rounding:
    """Return what becomes of weights that are rounded by their names; those that have none in ``weights`` have none."""
    names = {tensor.data_ptr(): name for name, tensor in weights.items()}
    return lambda module, weight: rounded(names.get(weight.data_ptr(), ""), weight)


def rounding_of(name: str, *, to_int8: Callable[[torch.Tensor], torch.Tensor]) -> Rounding | None:
    """Return what becomes of weights that are held as a name of :func:`weight_types` says; None where nothing does."""

    def to_type(module: torch.nn.Module, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(getattr(torch, name)).to(weight.dtype)

    def in_int8(module: torch.nn.Module, weight: torch.Tensor) -> torch.Tensor:
        return to_int8(weight) if isinstance(module, torch.nn.Linear) and weight.ndim == 2 else weight

    if name == PUBLISHED:
        return None
    return in_int8 if name == _INT8 else to_type
