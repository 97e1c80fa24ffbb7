"""The arguments of a slime or miles process as settings of ours, and the functions that they name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError

from rollfeed.app.rewards import RewardServices
from rollfeed.base.importing import import_object
from rollfeed.compat.slime_plugins.checking import check_call
from rollfeed.compat.slime_plugins.shared_run import SlimeRun
from rollfeed.compat.slime_plugins.slime_paths import import_path
from rollfeed.config import EngineSettings, RolloutConfig
from rollfeed.engine import resolve_checkpoint
from rollfeed.engine.client import ServerEngine
from rollfeed.errors import ConfigError
from rollfeed.model_files import find_config
from rollfeed.protocols import Tokenizer
from rollfeed.rewards.hub import RewardHub

GENERATE, REWARD, FILTER = "custom_generate_function_path", "custom_rm_path", "dynamic_sampling_filter_path"
SAMPLE_FILTER, PROCESS_ALL = "rollout_sample_filter_path", "rollout_all_samples_process_path"
HOOKS = "rollout_sample_hook_path"
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    GENERATE: ("args", "sample", "sampling_params"),
    REWARD: ("args", "sample"),
    FILTER: ("args", "samples"),
    SAMPLE_FILTER: ("args", "groups"),
    PROCESS_ALL: ("args", "groups", "data_source"),
}
_REFUSED: Mapping[str, str] = {
    "use_score_centering": "the sampler's best tokens are not read here",
    "over_sampling_filter_path": "name a --dynamic-sampling-filter-path, which sees every group",
    "fully_async": "a call makes one step: leave one of the two functions out",
    "use_session_server": "its generate functions are answered by a server of miles's",
    "recompute_logprobs_via_prefill": "logprobs are those of sampling",
    "lora_rank": "requests name no adapter",
    "lora_adapter_path": "requests name no adapter",
}
"""Arguments that must be off, and why."""
_ABORT_GRACE_SECONDS = {"partial": 10.0, "sync": 1.0}
"""For what is under way when the batch is full; without ``--partial-rollout`` nobody uses what it gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeJob:
    """Everything that a call is made of besides its prompts."""

    args: Any
    """Theirs, which their functions are handed."""
    config: RolloutConfig
    engine: EngineSettings
    functions: Mapping[str, Any]
    """By the name of their argument, those that are named."""


@dataclass(frozen=True, slots=True)
class SlimeWork:
    """Everything that calls of a process share."""

    engine: ServerEngine
    tokenizer: Tokenizer
    services: RewardServices
    hub: RewardHub
    run: SlimeRun
    """For the functions of slime that are supplied where it is not installed."""
    package: str
    """Theirs, ``slime`` or ``miles``."""
    waiting: list[list[Any]]
    """Groups that are answered before new ones."""

    def output(self, name: str, made: Any, metrics: Mapping[str, float]) -> Any:
        """Return a result in the form that the package has, or as it is where it is too old to have one."""
        try:
            forms = importlib.import_module(f"{self.package}.rollout.base_types")
        except ModuleNotFoundError:
            return made
        form = getattr(forms, name, None)
        return made if form is None else form(made, metrics=dict(metrics))


def read_job(args: Any, *, sample_class: Any) -> SlimeJob:
    """Return what the arguments of a process ask for; what they lack has slime's default.

    Raises:
        ConfigError: If one is not served or wrong, with its flag, or a function is not found or called otherwise.
    """
    for name in ("hf_checkpoint", "rollout_batch_size", "rollout_max_response_len"):
        if getattr(args, name, None) is None:
            raise ConfigError(f"{flag(name)} is not given")
    for name, reason in _REFUSED.items():
        if value := getattr(args, name, None):
            raise ConfigError(f"{flag(name)} {value}: {reason}; leave it out, or use slime's own rollout function")
    if getattr(args, "rollout_top_p", None) not in (None, 1.0) and hasattr(sample_class(), "rollout_top_p_token_ids"):
        raise ConfigError(
            f"--rollout-top-p {args.rollout_top_p}: this slime trains with the tokens that were kept, which are not "
            "read here: set it to 1, or use slime's own rollout function"
        )
    named = {name: getattr(args, name, None) for name in _PARAMETERS}
    functions = {name: named_function(path, name) for name, path in named.items() if path}
    for path in getattr(args, HOOKS, None) or ():
        named_function(path, HOOKS)
    if getattr(args, "multimodal_keys", None) and GENERATE not in functions:
        raise ConfigError("--multimodal-keys: images are for a --custom-generate-function-path: name one")
    try:
        return SlimeJob(args=args, config=_config(args), engine=_engine(args), functions=functions)
    except ValidationError as error:
        first = error.errors()[0]
        name, told = str(first["loc"][-1]), first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{flag(name)} {getattr(args, name, '')}: {told}") from None


@cache
def named_function(path: str, name: str) -> Any:
    """Return the function at a path of slime's, which an argument or a sample gives.

    Raises:
        PluginError: If it cannot be found, or slime calls it otherwise.
    """
    function = import_object(import_path(f"slime:{path}"), key=flag(name))
    if name in _PARAMETERS:  # a hook may take more
        where, is_async, is_generate = f"{flag(name)} {path}", name in (GENERATE, REWARD), name == GENERATE
        check_call(function, _PARAMETERS[name], key=where, allows_async=is_async, allows_miles=is_generate)
    return function


def flag(name: str) -> str:
    """Return an argument as people write it."""
    return f"--{name.replace('_', '-')}"


def texts(given: Any) -> tuple[str, ...]:
    """Return stop strings, of which slime takes one or a list."""
    return (given,) if isinstance(given, str) else tuple(given or ())


def _config(args: Any) -> RolloutConfig:
    mode = "partial" if getattr(args, "partial_rollout", False) else "sync"
    rollout = {
        "mode": mode,
        **_given(args, "rollout_batch_size", "over_sampling_batch_size"),
        "n_samples_per_prompt": 1,
        **_given(args, "n_samples_per_prompt"),
        "max_requests_in_flight": _concurrency(args),
        "group_failure": "retry",
        "rollout_timeout_seconds": _timeout(args),
        "abort_grace_seconds": _ABORT_GRACE_SECONDS[mode],
    }
    sampling = {
        **_given(args, "rollout_temperature", "rollout_top_p", "rollout_top_k", "rollout_max_response_len"),
        **_given(args, "rollout_max_context_len", "rollout_skip_special_tokens"),
        "rollout_stop": texts(getattr(args, "rollout_stop", None)),
        "rollout_stop_token_ids": tuple(getattr(args, "rollout_stop_token_ids", None) or ()),
        "return_routed_experts": bool(getattr(args, "use_rollout_routing_replay", False)),
    }
    reward = {
        "rm_type": (getattr(args, "rm_type", None) or "").strip() or None,
        "reward_key": getattr(args, "reward_key", None) or None,
        "remote": {"url": getattr(args, "rm_url", None), "max_tries": 10, "timeout_seconds": 120.0},
    }
    seed = _given(args, "rollout_seed").get("rollout_seed", 42)
    return RolloutConfig.model_validate({"seed": seed, "rollout": rollout, "sampling": sampling, "reward": reward})


def _engine(args: Any) -> EngineSettings:
    address = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    if None in address:
        raise ConfigError("--sglang-router-ip, --sglang-router-port: there is no router to ask for answers")
    limits = _given(args, "rollout_max_context_len", "eval_max_context_len") or _given(args, "sglang_context_length")
    servers = {
        "router": "http://{}:{}".format(*address),
        "concurrency": _concurrency(args),
        "request_timeout_seconds": _timeout(args),
    }
    length = max(limits.values()) if limits else _longest(args.hf_checkpoint)
    return EngineSettings.model_validate({"context_length": length, "sglang": servers})


def _longest(checkpoint: str) -> int:
    found = find_config(resolve_checkpoint(checkpoint, with_weights=False)) or {}
    longest = (found.get("text_config") or found).get("max_position_embeddings")
    if not isinstance(longest, int):
        raise ConfigError("--rollout-max-context-len: give it, as the checkpoint does not say how long texts may be")
    return longest


def _timeout(args: Any) -> float:
    return float(getattr(args, "sglang_router_request_timeout_secs", None) or 14_400.0)


def _concurrency(args: Any) -> int:
    """Return the requests at all engines together."""
    num_engines = getattr(args, "rollout_num_engines", None)
    if not num_engines:
        num_gpus = getattr(args, "rollout_num_gpus", None) or 1
        num_engines = max(1, num_gpus // (getattr(args, "rollout_num_gpus_per_engine", None) or 1))
    return int((getattr(args, "sglang_server_concurrency", None) or 512) * num_engines)


def _given(args: Any, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}
