"""A causal language model of transformers, and the log-probabilities it gives to tokens.

Axes: B rows, L places in a row, K places with logits, V vocabulary, N all places with logits, T trained tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollfeed.errors import ConfigError
from rollfeed.model_files import loading
from rollfeed.training.packing import MicroBatch

_CHUNK_ELEMENTS = 1 << 22
"""Logits that are exponentiated at a time: what bounds the memory beside the logits themselves."""
_TREE_TOLERANCE = 1e-3
"""Between logits of a tree and of its sequences, where the largest is 1."""


def load_model(checkpoint: Path, *, device: torch.device, trust_remote_code: bool = False) -> Any:
    """Return the model of a local folder in fp32, in training mode, without dropout.

    Dropout is off because a policy that changes from one pass to the next has no ratio to what sampled the tokens.

    Raises:
        CheckpointError: If the folder is not that of a causal language model, or lacks weights.
    """
    model = loading.load_model(
        checkpoint, dtype=torch.float32, trust_remote_code=trust_remote_code, change_config=_switch_dropout_off
    )
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.to(device).train()


def enable_activation_checkpointing(model: Any) -> None:
    """Have the model compute its layers again in the backward pass.

    Raises:
        ConfigError: If it does not know how.
    """
    try:
        # Earlier releases of transformers 5 have it under its older name only.
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"train.activation_checkpointing = true: {error}; set it to false") from error


def exported_weights(model: Any) -> dict[str, Tensor]:
    """Return the weights by the names of a Hugging Face checkpoint, tied ones once; they are the model's own memory.

    Where transformers renames or fuses weights when it loads a checkpoint, this is undone.
    """
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if getattr(model, "_weight_conversions", None):
        from transformers.core_model_loading import revert_weight_conversion

        tensors = dict(revert_weight_conversion(model, tensors))
    return tensors


class Scored(NamedTuple):
    """What a model says of the trained tokens of a micro-batch."""

    logprobs_T: Tensor
    """Natural-log probability after temperature; has a gradient where the pass has."""
    entropy_T: Tensor
    """Of the distribution that the token was predicted by; without gradient."""


class Policy:
    """A model as the distribution that tokens are sampled from, at one temperature.

    Args:
        model: What :func:`load_model` returned.
        temperature: What the logits are divided by, as in sampling. Truncation by ``top_p`` and the like is not
            followed: with it, rollout log-probabilities are larger than these.
        autocast: What the passes compute in; None leaves it to the weights.
        threads: Of the CPU; None leaves it to PyTorch.
    """

    def __init__(
        self, model: Any, *, temperature: float, autocast: torch.dtype | None = None, threads: int | None = None
    ) -> None:
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._temperature = temperature
        self._autocast = autocast
        self._threads = threads
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def score(self, micro_batch: MicroBatch) -> Scored:
        """Return log-probabilities and entropies of the trained tokens, ``(T,)`` each."""
        with torch.autocast(self.device.type, dtype=self._autocast, enabled=self._autocast is not None):
            logits_BKV = self._logits(micro_batch)
        num_kept = len(micro_batch.columns_K)
        place_T = self._tensor(micro_batch.rows_T * num_kept + micro_batch.kept_T)
        logits_NV = logits_BKV.reshape(-1, logits_BKV.shape[-1])
        logprobs_T, entropy_N = score_tokens(
            logits_NV, place_T=place_T, target_T=self._tensor(micro_batch.targets_T), temperature=self._temperature
        )
        return Scored(logprobs_T, entropy_N[place_T])

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Have what this thread computes take the policy's number of threads, whatever others have set."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def check_tokens(self, token_ids: NDArray[np.int32]) -> None:
        """Raise ConfigError if a token id is outside the model's vocabulary."""
        largest = int(token_ids.max())
        if largest >= self.vocab_size:
            raise ConfigError(
                f"token id {largest} is outside the model's vocabulary of {self.vocab_size}: the tokenizer of the "
                "rollouts does not belong to the model that is trained"
            )

    def can_share_prompts(self) -> bool:
        """Whether a prompt with several branches gives what its sequences give one by one: tried, not looked up.

        Sliding windows are not tried but refused: places in a row are then no distances.
        """
        config = self.model.config
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            return False
        size = max(1, self.vocab_size - 1)
        prompt, branches = [1 % size, 2 % size, 3 % size], [[4 % size, 5 % size], [5 % size, 6 % size, 2 % size]]
        tree = torch.tensor([[*prompt, *branches[0], *branches[1]]], device=self.device)
        positions = torch.tensor([[0, 1, 2, 3, 4, 3, 4, 5]], device=self.device)
        numbers = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]], device=self.device)
        with torch.no_grad():
            try:
                mask = tree_attention(numbers)
                output = self.model(input_ids=tree, position_ids=positions, attention_mask=mask, use_cache=False)
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
                return False  # a model that does not take such a mask says so in a way of its own
            alone = [
                self.model(input_ids=torch.tensor([[*prompt, *branch]], device=self.device), use_cache=False).logits[0]
                for branch in branches
            ]
        expected = torch.cat([alone[0], alone[1][3:]])
        scale = max(1.0, float(expected.abs().max()))
        return bool((output.logits[0] - expected).abs().max() <= _TREE_TOLERANCE * scale)

    def _logits(self, micro_batch: MicroBatch) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": self._tensor(micro_batch.token_ids_BL), "use_cache": False}
        columns_K = self._tensor(micro_batch.columns_K)
        if micro_batch.branches_BL is not None:
            inputs["position_ids"] = self._tensor(micro_batch.position_ids_BL)
            inputs["attention_mask"] = tree_attention(self._tensor(micro_batch.branches_BL))
        if self._keeps_logits:
            inputs["logits_to_keep"] = columns_K
        logits: Tensor = self.model(**inputs).logits
        return logits if self._keeps_logits else logits[:, columns_K]

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def tree_attention(branches_BL: Tensor) -> Tensor:
    """Return the additive mask of rows with branches, ``(B, 1, L, L)``: a place sees the prompt and its own branch."""
    length = branches_BL.shape[1]
    seen_from = branches_BL[:, :, None]
    seen = branches_BL[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=branches_BL.device).tril()
    allowed = causal & ((seen == 0) | (seen == seen_from))
    blocked = torch.finfo(torch.float32).min
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, blocked)[:, None]


def score_tokens(logits_NV: Tensor, *, place_T: Tensor, target_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probability of ``target_T`` at ``place_T`` ``(T,)``, and each place's entropy ``(N,)``.

    Computed in fp32 at least, a few rows at a time: beside the logits there is only their gradient in memory.
    """
    logprobs_T, entropy_N = _ScoreTokens.apply(logits_NV, place_T, target_T, temperature)  # type: ignore[no-untyped-call]
    return logprobs_T, entropy_N


class _ScoreTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, logits_NV: Tensor, place_T: Tensor, target_T: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        normaliser_N = torch.empty(len(logits_NV), dtype=dtype, device=logits_NV.device)
        entropy_N = torch.empty_like(normaliser_N)
        for start, end in _chunks(logits_NV):
            scaled = logits_NV[start:end].to(dtype) / temperature
            normaliser_N[start:end] = torch.logsumexp(scaled, dim=1)
            centred = scaled - normaliser_N[start:end, None]
            # A logit of -inf has probability 0, and brings no entropy.
            entropy_N[start:end] = -(centred.exp() * centred.clamp_min(torch.finfo(dtype).min)).sum(dim=1)
        chosen_T = logits_NV[place_T, target_T].to(dtype) / temperature
        context.save_for_backward(logits_NV, normaliser_N, place_T, target_T)
        context.temperature = temperature
        context.mark_non_differentiable(entropy_N)
        return chosen_T - normaliser_N[place_T], entropy_N

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, normaliser_N, place_T, target_T = context.saved_tensors
        gradient_T = gradients[0] / context.temperature
        dtype = normaliser_N.dtype
        total_N = torch.zeros_like(normaliser_N).index_add_(0, place_T, gradient_T)
        gradient_NV = torch.empty_like(logits_NV)
        for start, end in _chunks(logits_NV):
            scaled = logits_NV[start:end].to(dtype) / context.temperature
            gradient_NV[start:end] = (scaled - normaliser_N[start:end, None]).exp_().mul_(-total_N[start:end, None])
        gradient_NV.index_put_((place_T, target_T), gradient_T.to(gradient_NV.dtype), accumulate=True)
        return gradient_NV, None, None, None


def _chunks(logits_NV: Tensor) -> Iterator[tuple[int, int]]:
    num_rows = max(1, _CHUNK_ELEMENTS // max(1, logits_NV.shape[1]))
    for start in range(0, len(logits_NV), num_rows):
        yield start, min(start + num_rows, len(logits_NV))


def _switch_dropout_off(config: Any) -> None:
    for name, value in vars(config).items():
        if ("dropout" in name or name.endswith(("pdrop", "_drop"))) and isinstance(value, float):
            setattr(config, name, 0.0)
