"""Models that transformers computes: loaded from the files that count, or compared with their headers only.

The class and its renaming and fusing of tensors are transformers'; which files are read is not left to it, since it
would also apply an adapter that lies beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from rollfeed.errors import CheckpointError
from rollfeed.model_files.content import read_config
from rollfeed.model_files.headers import mismatch, read_headers, refuse_missing, tell_of_unknown, weight_files
from rollfeed.model_files.seeing import sees

_SCORE_HEAD = "score.weight"


def load_causal_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    change_config: Callable[[Any], None] = lambda config: None,
    auto_model: Any = AutoModelForCausalLM,
    new_head: bool = False,
) -> Any:
    """Return the model of a local folder, on the CPU and in evaluation mode.

    Args:
        folder: Of the checkpoint.
        dtype: Of the weights.
        trust_remote_code: Run code that lies in the folder.
        change_config: Called with its configuration before the model is made.
        auto_model: The class that chooses the model's, where that is not a causal language model.
        new_head: Whether ``score``, the head of a classifier, may be missing: it is then 0 everywhere.

    Raises:
        CheckpointError: If the folder is not that of such a model, or weights are missing or not finite.
    """
    if auto_model is AutoModelForCausalLM:
        _check_config(folder)
    read_headers(folder)
    with _as_checkpoint_error(folder), _quiet():
        empty = _empty_model(
            folder, trust_remote_code=trust_remote_code, change_config=change_config, auto_model=auto_model
        )
        # They must stay open until their slices have been read.
        readers: list[Any] = [safe_open(file, framework="pt") for file in weight_files(folder)]
        slices = {name: reader.get_slice(name) for reader in readers for name in reader.keys()}  # noqa: SIM118
        model, found = type(empty).from_pretrained(
            None,
            config=empty.config,
            state_dict=slices,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    unknown, missing = set(found["unexpected_keys"]), set(found["missing_keys"])
    if new_head and missing == {_SCORE_HEAD}:
        torch.nn.init.zeros_(model.get_parameter(_SCORE_HEAD))
        unknown, missing = {name for name in unknown if not name.startswith("lm_head.")}, set[str]()
    _refuse_differences(folder, mismatched=found["mismatched_keys"], missing=missing)
    tell_of_unknown(folder, unknown)
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(f"{folder}: weight {name!r}: some of its values are not finite: fetch it again")
    return model


def empty_model(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the model of a folder on the meta device, without its weights.

    Raises:
        CheckpointError: If transformers cannot make it.
    """
    with _as_checkpoint_error(folder), _quiet():
        return _empty_model(folder, trust_remote_code=trust_remote_code)


def check_model(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Compare the headers of a folder with its model; what the model does not have is told of.

    Raises:
        CheckpointError: As :func:`load_causal_model` would.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    _check_config(folder)
    headers = read_headers(folder)
    with _as_checkpoint_error(folder), _quiet():
        model = _empty_model(folder, trust_remote_code=trust_remote_code)
        tensors = {name: torch.empty(header.shape, device="meta") for name, header in headers.items()}
        conversions: Any = get_model_conversion_mapping(model)
        options = LoadStateDictConfig(
            device_map={"": torch.device("meta")},
            dtype=torch.float32,
            weight_mapping=conversions,
            ignore_mismatched_sizes=True,
        )
        found, _ = model._load_pretrained_model(model, tensors, None, options)
        model.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)
        model._adjust_missing_and_unexpected_keys(found)
    _refuse_differences(folder, mismatched=found.mismatched_keys, missing=found.missing_keys)
    tell_of_unknown(folder, found.unexpected_keys)


def _check_config(folder: Path) -> None:
    about = read_config(folder).get("quantization_config")
    if isinstance(about, dict) and about.get("quant_method") == "fp8":
        raise CheckpointError(
            f"{folder}: its weights are in FP8, which only servers compute with: have SGLang or vLLM serve it, and "
            "train the same model in BF16 (train.checkpoint)"
        )


def _empty_model(
    folder: Path,
    *,
    trust_remote_code: bool,
    change_config: Callable[[Any], None] = lambda config: None,
    auto_model: Any = AutoModelForCausalLM,
) -> Any:
    config: Any = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    change_config(config)
    if auto_model is AutoModelForCausalLM and sees(config) and type(config) not in auto_model._model_mapping:
        auto_model = AutoModelForImageTextToText
    with torch.device("meta"):
        return auto_model.from_config(config, trust_remote_code=trust_remote_code)


def _refuse_differences(folder: Path, *, mismatched: Any, missing: Any) -> None:
    for name, found, expected in sorted(mismatched):
        raise mismatch(folder, name, found, expected)
    refuse_missing(folder, missing)


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # every way loading can fail means the same to the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{folder}: transformers cannot load it ({reason})") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from its progress bar and its table of differences: they are told of here, in a line."""
    log: Any = transformers_logging
    had_bar, verbosity = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if had_bar:
            log.enable_progress_bar()
