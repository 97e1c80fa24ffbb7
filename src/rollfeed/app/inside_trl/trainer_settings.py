"""Settings of TRL's trainers as settings of ours, and what cannot be had with them.

Written for TRL 1.16; docs/from-trl.md has all names side by side.
"""

from __future__ import annotations

import logging
from importlib import import_module, metadata
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from rollfeed.config import EngineSettings, RolloutConfig, RolloutSettings, SamplingSettings
from rollfeed.config.load import describe
from rollfeed.errors import ConfigError

_log = logging.getLogger(__name__)

_WRITTEN_FOR = "1.16."
_MOST_SLOTS = 64
_SAMPLING = {
    "rollout_temperature": "temperature",
    "rollout_top_p": "top_p",
    "rollout_top_k": "top_k",
    "rollout_max_response_len": "max_completion_length",
    "repetition_penalty": "repetition_penalty",
}
"""TRL's names by ours."""
_OF_TRL = {
    "seed": "seed",
    "plugins.prompt_source": "train_dataset",
    "rollout.mode": "the kind of trainer",
    "rollout.rollout_batch_size": "per_device_train_batch_size",
    "rollout.n_samples_per_prompt": "num_generations",
    "rollout.max_staleness": "max_staleness",
    **{f"sampling.{ours}": theirs for ours, theirs in _SAMPLING.items()},
}
_REFUSED = {
    "use_vllm": "TRL would start or ask vLLM besides: set it to False, and give the server's address as engine",
    "use_transformers_continuous_batching": "the trainer's own generation is not used: set it to False",
    "min_p": "rollfeed does not sample with it: remove it",
    "generation_kwargs": "they are for the trainer's own generation: remove them",
}


def find_trl(module: str, name: str) -> Any:
    """Return what has this name in the installed TRL.

    Raises:
        ConfigError: If there is no TRL, or not this name in it.
    """
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"TRL is not installed: pip install 'trl=={_WRITTEN_FOR}*'") from None
    if not version.startswith(_WRITTEN_FOR):
        _log.warning("TRL %s is installed, and rollfeed.compat.trl is written for %s*", version, _WRITTEN_FOR)
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"TRL {version}: {error}; install trl=={_WRITTEN_FOR}*") from error


def values_of(args: Any, *names: str) -> list[Any]:
    """Return arguments of a trainer's configuration.

    Raises:
        ConfigError: If it does not have one of them.
    """
    if missing := [name for name in names if not hasattr(args, name)]:
        raise ConfigError(f"{type(args).__name__} has no {missing[0]}: install trl=={_WRITTEN_FOR}*")
    return [getattr(args, name) for name in names]


def as_config(config: RolloutConfig, args: Any, **rollout: Any) -> RolloutConfig:
    """Return our settings with what TRL's ``GRPOConfig`` or ``AsyncGRPOConfig`` says, and these keys of ``[rollout]``.

    Raises:
        ConfigError: If ``config`` says what is TRL's to say, or a value cannot be had; names TRL's argument.
    """
    for key, theirs in _OF_TRL.items():
        if attrgetter(key)(config) != attrgetter(key)(RolloutConfig()):
            raise ConfigError(f"{key}: {theirs} of TRL says it: remove it from rollfeed's config")
    if config.teacher is not None:
        raise ConfigError("teacher: TRL makes the loss of its trainers, and GKDTrainer distils: remove [teacher]")
    for name, remedy in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"{name} = {getattr(args, name)!r}: {remedy}")
    sampling = dict(zip(_SAMPLING, values_of(args, *_SAMPLING.values()), strict=True))
    sampling["rollout_top_k"] = sampling["rollout_top_k"] or -1
    seed, num_generations = values_of(args, "seed", "num_generations")
    rollout = {**config.rollout.model_dump(exclude_unset=True), "n_samples_per_prompt": num_generations, **rollout}
    sections: dict[str, Any] = {"seed": seed}
    try:
        sections["sampling"] = SamplingSettings(**{**config.sampling.model_dump(exclude_unset=True), **sampling})
        sections["rollout"] = RolloutSettings(**rollout)
    except ValidationError as error:
        root = RolloutSettings if "sampling" in sections else SamplingSettings
        raise ConfigError(f"{type(args).__name__}: {describe(error.errors()[0], root)}") from None
    return config.model_copy(update=sections)


def default_engine(device: Any, *, context_length: int) -> EngineSettings:
    """Return the embedded engine where the trainer computes: on its GPU, or the CPU."""
    own = str(device) if device.type == "cuda" else "cpu"
    return EngineSettings(context_length=context_length, num_slots=_MOST_SLOTS, device=own)
