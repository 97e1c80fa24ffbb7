"""Chooses what computes a checkpoint, and makes the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollfeed.base.cores import num_physical_cores
from rollfeed.engine.backends.architecture import Architecture, border, unsupported_reason
from rollfeed.engine.backends.backend import Backend
from rollfeed.engine.backends.batching import PREFILL_TOKENS, ContinuousBatcher, Runner
from rollfeed.engine.backends.native.library import NativeUnavailableError, load_library
from rollfeed.engine.backends.native.model import quantised_refusal
from rollfeed.engine.backends.native.runner import NativeRunner
from rollfeed.engine.backends.pytorch.runner import TorchRunner
from rollfeed.engine.backends.replacement import CheckpointTensors
from rollfeed.engine.embeddable import TIED, check_sizes, read_architecture
from rollfeed.engine.local.embedded import EmbeddedEngine
from rollfeed.errors import ConfigError, in_one_line
from rollfeed.model_files import read_config, read_eos_token_ids
from rollfeed.protocols import PictureProcessor, Tokenizer

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def create_local_engine(
    *,
    checkpoint: Path,
    tokenizer: Tokenizer,
    threads: int,
    num_slots: int,
    context_length: int,
    deterministic: bool,
    device: str = "cpu",
    kernels: str = "auto",
    precision: str = "auto",
    pictures: PictureProcessor | None = None,
) -> EmbeddedEngine:
    """Return an engine for a folder in Hugging Face layout; nothing is loaded before it is entered.

    Llama, Mistral, Qwen2 and Qwen3 models are computed here, others through transformers.

    Args:
        checkpoint: The folder.
        tokenizer: The model's; for stop strings and the text of completions.
        threads: For the engine; 0 chooses by measurement, up to the physical cores open to this process, where the
            native kernels compute, and takes all otherwise.
        num_slots: How many requests run at once.
        context_length: Of both together; memory for keys and values is kept for ``num_slots`` times as many tokens.
        deterministic: Compute each request so that the others do not change a bit of it. The same bits come out again
            on the same machine.
        device: ``cpu`` or a CUDA device of torch.
        kernels: What computes on the CPU: ``native`` (compiled here), ``torch``, or ``auto`` for native ones where they
            can be compiled.
        precision: ``fp32`` (CPU), ``bf16`` (CUDA), ``int8`` (native kernels: weights and activations of 8 bits, an
            approximation that completions are marked with), or ``auto`` for exact.
        pictures: The model's processor of pictures; None where prompts have none.

    Raises:
        CheckpointError: If the folder is not a causal language model, or its weight files are not whole or not the
            model's.
        ConfigError: If a number is out of its range, or the parts do not go together.
    """
    config, target = read_config(checkpoint), _usable_device(device)
    check_sizes(config, checkpoint, threads=threads, num_slots=num_slots, context_length=context_length)
    if deterministic and target.type != "cpu":
        raise ConfigError(f"deterministic = true: holds on the CPU only, not on {device}")
    options = _Options(
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        threads=threads,
        num_slots=num_slots,
        context_length=context_length,
        deterministic=deterministic,
        device=target,
        kernels=kernels,
        precision=_settled_precision(precision, target),
    )
    return EmbeddedEngine(
        _backend(config, options),
        tokenizer=tokenizer,
        eos_token_ids=sorted({*tokenizer.eos_token_ids, *read_eos_token_ids(checkpoint)}),
        context_length=context_length,
        pictures=pictures,
    )


def _usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"engine.device = {name!r}: not usable here ({in_one_line(error)}); try 'cpu'") from error
    return device


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The arguments of :func:`create_local_engine`, with the precision settled."""

    checkpoint: Path
    tokenizer: Tokenizer
    threads: int
    num_slots: int
    context_length: int
    deterministic: bool
    device: torch.device
    kernels: str
    precision: str


def _settled_precision(precision: str, device: torch.device) -> str:
    exact = "fp32" if device.type == "cpu" else "bf16"
    if precision not in ("auto", exact, "int8"):
        raise ConfigError(f"engine.precision = {precision!r}: the engine computes in {exact} or int8 on {device}")
    return exact if precision == "auto" else precision


def _backend(config: Mapping[str, Any], options: _Options) -> Backend:
    reason = unsupported_reason(config, context_length=options.context_length)
    if reason is None:
        return _continuous_batcher(config, options)
    if options.precision == "int8":
        raise ConfigError(f"engine.precision = 'int8': not for this model ({reason})")
    logger.warning("%s: generated through transformers, which is slower: %s", options.checkpoint, reason)
    return _fallback(config, options)


def _continuous_batcher(config: Mapping[str, Any], options: _Options) -> Backend:
    architecture = _architecture(config, options.checkpoint)
    kernels = _chosen_kernels(options)
    return ContinuousBatcher(
        (_native_runner if kernels == "native" else _torch_runner)(architecture, options),
        checkpoint=options.checkpoint,
        tokenizer=options.tokenizer,
        precision=options.precision,
        vocab_size=architecture.vocab_size,
        num_slots=options.num_slots,
    )


def _architecture(config: Mapping[str, Any], checkpoint: Path) -> Architecture:
    """Return the dimensions of a checkpoint whose weights are there and have them."""
    architecture, brings_head = read_architecture(config, checkpoint)
    if brings_head and not _are_equal(checkpoint):
        logger.warning("%s: %s and %s differ, so they are not tied, whatever config.json says", checkpoint, *TIED)
        return replace(architecture, tied_head=False)
    return architecture


def _are_equal(checkpoint: Path) -> bool:
    tensors = CheckpointTensors(checkpoint, TIED)
    return torch.equal(*(tensors[name] for name in TIED))


def _fallback(config: Mapping[str, Any], options: _Options) -> Backend:
    # Their imports take seconds, which models that are computed here need not wait for.
    from rollfeed.engine.backends.transformers import TransformersBackend
    from rollfeed.model_files.loading import check_model
    from rollfeed.model_files.trial import is_small, load_tried

    checkpoint = options.checkpoint
    limit = border(config)
    if limit is not None and options.context_length > limit.length:
        raise ConfigError(
            f"engine.context_length = {options.context_length}: what this model says of a text of more than "
            f"{limit.length} tokens is not the same token by token and at once ({limit.reason}): set it to at most "
            f"{limit.length}"
        )
    dtype = _DTYPES[options.precision]
    load_model: Callable[[], Any] = partial(load_tried, checkpoint, dtype=dtype, generates=True)
    if is_small(checkpoint):
        # In fp32 whatever the device, since rounding hides what is looked for.
        model = load_tried(checkpoint, dtype=torch.float32, generates=True)
        load_model = partial(_itself, model) if dtype is torch.float32 else load_model
    else:
        check_model(checkpoint)
    return TransformersBackend(
        checkpoint=checkpoint,
        load_model=load_model,
        tokenizer=options.tokenizer,
        threads=options.threads or num_physical_cores(),
        num_slots=1 if options.deterministic else options.num_slots,
        device=options.device,
        precision=options.precision,
    )


def _itself(model: Any) -> Any:
    return model


def _chosen_kernels(options: _Options) -> str:
    """Return ``native`` or ``torch``."""
    kernels, quantised = options.kernels, options.precision == "int8"
    if options.device.type != "cpu":
        if kernels == "native" or quantised:
            raise ConfigError(f"the native kernels and int8 are for device = 'cpu', not {str(options.device)!r}")
        return "torch"
    if kernels == "torch":
        if quantised:
            raise ConfigError("engine.precision = 'int8': needs the native kernels, not engine.kernels = 'torch'")
        return "torch"
    try:
        load_library()
    except NativeUnavailableError as error:
        if kernels == "native" or quantised:
            raise ConfigError(f"the engine's native kernels are not available: {error}") from None
        logger.warning("computing with torch, which is slower: %s", error)
        return "torch"
    return "native"


def _torch_runner(architecture: Architecture, options: _Options) -> Callable[[], Runner]:
    return partial(
        TorchRunner,
        architecture,
        threads=options.threads or num_physical_cores(),
        num_slots=options.num_slots,
        context_length=options.context_length,
        deterministic=options.deterministic,
        device=options.device,
        dtype=_DTYPES[options.precision],
    )


def _native_runner(architecture: Architecture, options: _Options) -> Callable[[], Runner]:
    refusal = quantised_refusal(architecture) if options.precision == "int8" else None
    if refusal is not None:
        raise ConfigError(f"engine.precision = 'int8': {refusal}")
    return partial(
        NativeRunner,
        architecture,
        threads=options.threads,
        max_threads=num_physical_cores(),
        num_slots=options.num_slots,
        context_length=options.context_length,
        max_prefill=PREFILL_TOKENS,
        quantised=options.precision == "int8",
    )
