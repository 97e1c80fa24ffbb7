"""A causal language model of transformers, and the log-probabilities it gives to tokens.

Axes: B rows, L places in a row, K places with logits, V vocabulary, N all places with logits, T trained tokens.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollfeed.config.train import TrainPrecision
from rollfeed.errors import ConfigError
from rollfeed.model_files.loading import load_causal_model
from rollfeed.model_files.seeing import looking
from rollfeed.model_files.trial import longest_text, vocab_size_of
from rollfeed.protocols import PictureProcessor
from rollfeed.training.packing import MicroBatch, TrainSequence
from rollfeed.training.placed_pictures import pixels_of_rows
from rollfeed.training.scoring import DrawnFrom, score_tokens


def choose_device(name: str) -> torch.device:
    """Return the device of a ``train.device`` setting. Raises ConfigError if there is none of that name."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"train.device = {name!r}: not usable here ({reason}); try 'auto' or 'cpu'") from error
    return device


def autocast_of(precision: TrainPrecision, device: torch.device) -> torch.dtype | None:
    """Return what passes compute in on a device; None leaves it to the weights."""
    bf16 = precision is TrainPrecision.BF16 or (precision is TrainPrecision.AUTO and device.type == "cuda")
    return torch.bfloat16 if bf16 else None


def load_policy_model(checkpoint: Path, *, device: torch.device, trust_remote_code: bool = False) -> Any:
    """Return the model of a local folder in fp32, in evaluation mode.

    A policy that changes from one pass to the next, by dropout or noise in a router, has no ratio to what sampled the
    tokens.

    Raises:
        CheckpointError: If the folder is not that of a causal language model, or lacks weights.
    """
    model = load_causal_model(
        checkpoint, dtype=torch.float32, trust_remote_code=trust_remote_code, change_config=switch_dropout_off
    )
    return model.to(device)


def enable_activation_checkpointing(model: Any) -> None:
    """Have the model compute its layers again in the backward pass.

    transformers does so in training mode only, in which the modules concerned are then; dropout stays off.

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
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def freeze(model: Any, patterns: Sequence[str]) -> None:
    """Keep parameters from being trained whose names have a match of some pattern.

    Raises:
        ConfigError: If a pattern has a match in none, or nothing is left.
    """
    for pattern in patterns:
        found = [parameter for name, parameter in model.named_parameters() if re.search(pattern, name)]
        if not found:
            some = ", ".join(name for name, _ in list(model.named_parameters())[:3])
            raise ConfigError(f"train.freeze_params: {pattern!r} matches no parameter of the model ({some}, ...)")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("train.freeze_params: nothing is left to train: remove a pattern")


class Scored(NamedTuple):
    """Log-probabilities and entropies of the trained tokens of a micro-batch."""

    logprobs_T: Tensor
    """Natural-log probability after temperature; has a gradient where the pass has."""
    entropy_T: Tensor
    """Of the distribution that the token was predicted by; without gradient."""


class Policy:
    """A model as the distribution that tokens are sampled from, at one temperature.

    Args:
        model: What :func:`load_policy_model` returned.
        temperature: What the logits are divided by, as in sampling. Truncation by ``top_p`` and the like is followed
            where there are sampling masks; without them, rollout log-probabilities are larger than these.
        autocast: What the passes compute in; None leaves it to the weights.
        threads: Of the CPU; None leaves it to PyTorch.
        pictures: The model's processor of pictures; None where there are none.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        autocast: torch.dtype | None = None,
        threads: int | None = None,
        pictures: PictureProcessor | None = None,
    ) -> None:
        self.model = model
        self.pictures = pictures
        self.device: torch.device = next(model.parameters()).device
        self.vocab_size = vocab_size_of(model)
        self._temperature = temperature
        self._autocast = autocast
        self._threads = threads
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def score(self, micro_batch: MicroBatch, *, temperature: float | None = None, exact: bool = False) -> Scored:
        """Return log-probabilities and entropies of the trained tokens, ``(T,)`` each.

        ``temperature`` is another one than the policy's; ``exact`` computes in the type of the weights, whatever the
        passes of training compute in.
        """
        autocast = None if exact else self._autocast
        with torch.autocast(self.device.type, dtype=autocast, enabled=autocast is not None):
            logits_BKV = self._logits(micro_batch)
        num_kept = len(micro_batch.columns_K)
        place_T = self._tensor(micro_batch.rows_T * num_kept + micro_batch.kept_T)
        logits_NV = logits_BKV.reshape(-1, logits_BKV.shape[-1])
        mask = micro_batch.sampling_mask
        logprobs_T, entropy_N = score_tokens(
            logits_NV,
            place_T=place_T,
            target_T=self._tensor(micro_batch.targets_T),
            temperature=temperature or self._temperature,
            drawn_from=None
            if mask is None
            else DrawnFrom(self._tensor(mask.positions), self._tensor(mask.token_ids.astype(np.int64))),
        )
        return Scored(logprobs_T, entropy_N[place_T])

    def score_each(
        self, micro_batches: Iterable[MicroBatch], *, temperature: float | None = None, exact: bool = False
    ) -> dict[int, Scored]:
        """Return what :meth:`score` says of each sequence, on the CPU and without gradient, by ``sequence_id``."""
        found: dict[int, Scored] = {}
        with torch.no_grad(), self.computing():
            for micro_batch in micro_batches:
                scored = self.score(micro_batch, temperature=temperature, exact=exact)
                for number in np.unique(micro_batch.sequence_ids_T):
                    own = torch.from_numpy(micro_batch.sequence_ids_T == number)
                    found[int(number)] = Scored(*(each.cpu()[own] for each in scored))
        return found

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Have what this thread computes take the policy's number of threads, whatever others have set."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def check(self, sequence: TrainSequence, *, name: str, remedy: str) -> None:
        """Raise ConfigError if a token id is outside the model's vocabulary, or the sequence longer than it takes.

        ``remedy`` is what helps where it is too long.
        """
        longest = longest_text(self.model)
        if longest is not None and sequence.num_inputs > longest:
            raise ConfigError(
                f"{name} {sequence.sample_index} has {sequence.num_inputs} tokens, and the model that is trained takes "
                f"at most {longest}: {remedy}"
            )
        largest = int(sequence.token_ids.max())
        if largest >= self.vocab_size:
            raise ConfigError(
                f"token id {largest} is outside the model's vocabulary of {self.vocab_size}: the tokenizer of the "
                "rollouts does not belong to the model that is trained"
            )

    def _logits(self, micro_batch: MicroBatch) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": self._tensor(micro_batch.token_ids_BL), "use_cache": False}
        is_picture_BL = micro_batch.is_picture_BL
        columns_K = self._tensor(micro_batch.columns_K)
        if micro_batch.branches_BL is not None:
            inputs["position_ids"] = self._tensor(micro_batch.position_ids_BL)
            inputs["attention_mask"] = tree_attention(self._tensor(micro_batch.branches_BL))
        if self._keeps_logits:
            inputs["logits_to_keep"] = columns_K
        if is_picture_BL is None or self.pictures is None:
            logits: Tensor = self.model(**inputs).logits
        else:
            pixels = pixels_of_rows(micro_batch.pictures_B, self.pictures)
            token_ids_BL = inputs.pop("input_ids")
            with looking(
                self.model, token_ids_BL, is_picture_BL=self._tensor(is_picture_BL), pixels=pixels
            ) as arguments:
                logits = self.model(**arguments, **inputs).logits
        return logits if self._keeps_logits else logits[:, columns_K]

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self.device)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor there, without waiting for what the device computes; on a CPU it is a view."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def tree_attention(branches_BL: Tensor) -> Tensor:
    """Return the additive mask of rows with branches, ``(B, 1, L, L)``: a place sees the prompt and its own branch."""
    length = branches_BL.shape[1]
    seen_from = branches_BL[:, :, None]
    seen = branches_BL[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=branches_BL.device).tril()
    allowed = causal & ((seen == 0) | (seen == seen_from))
    blocked = torch.finfo(torch.float32).min
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, blocked)[:, None]


def switch_dropout_off(config: Any) -> None:
    """Take dropout out of a configuration of transformers."""
    for part in filter(None, (config, config.get_text_config(decoder=True), getattr(config, "vision_config", None))):
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
