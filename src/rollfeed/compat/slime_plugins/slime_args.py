"""The ``args`` that slime's plug-ins read: our settings under slime's names."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rollfeed.compat.slime_plugins.slime_paths import is_slime_path
from rollfeed.config import RolloutConfig, RolloutMode, Settings

ENGINE_ADDRESS = ("127.0.0.1", 30000)
"""Where the engine seems to be when it is embedded; the supplied ``post`` and ``get`` know better."""


class SlimeArguments(Namespace):
    """Cannot be written to: a run has one, which all its plug-ins share. A copy of it can."""

    def changed(self, **values: Any) -> SlimeArguments:
        """Return other arguments with some values changed."""
        made = SlimeArguments()
        vars(made).update({**vars(self), **values})
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args.{name}: args are the settings of the run and cannot be set: change a copy of them")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"args.{name}: args are the settings of the run and cannot be deleted")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(missing(name))

    def __copy__(self) -> Namespace:
        return Namespace(**vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Namespace:
        return Namespace(**copy.deepcopy(vars(self), memo))


def missing(name: str) -> str:
    """Say that there is no such argument, and what to do."""
    return f"args.{name} has no counterpart in the settings: give it in [plugins.slime_args]"


def slime_arguments(config: RolloutConfig) -> SlimeArguments:
    """Return what slime's plug-ins may read.

    Args:
        config: The run's; a whole ``Settings`` has names of model, data, engine and evaluation besides.
    """
    values = {**_constants(), **_of_rollouts(config), **_of_plugins(config)}
    if isinstance(config, Settings):
        values |= _of_settings(config)
    made = SlimeArguments()
    vars(made).update({**values, **config.plugins.slime_args})
    return made


def _constants() -> dict[str, Any]:
    """Return what has one value here."""
    return {
        "rollout_global_dataset": True,
        "disable_rollout_global_dataset": False,
        "rewards_normalization": True,
        "advantage_estimator": "grpo",
        "sglang_router_ip": ENGINE_ADDRESS[0],
        "sglang_router_port": ENGINE_ADDRESS[1],
        "sglang_server_concurrency": 512,
        "sglang_dp_size": 1,
        "sglang_speculative_algorithm": None,
        "sglang_enable_deterministic_inference": False,
        "sglang_model_routers": None,
        "router_policy": None,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "use_distributed_post": False,
        "use_wandb": False,
        "ci_test": False,
        "dump_details": None,
        "debug_rollout_only": False,
        "start_rollout_id": None,
        "multimodal_keys": None,
        "save": None,
        "load": None,
    }


def _of_rollouts(config: RolloutConfig) -> dict[str, Any]:
    rollout, sampling, reward = config.rollout, config.sampling, config.reward
    return {
        "rollout_batch_size": rollout.rollout_batch_size,
        "n_samples_per_prompt": rollout.n_samples_per_prompt,
        "over_sampling_batch_size": rollout.first_submission,
        "global_batch_size": rollout.rollout_batch_size * rollout.n_samples_per_prompt,
        "num_rollout": rollout.num_rollout,
        "partial_rollout": rollout.mode is not RolloutMode.SYNC,
        "mask_offpolicy_in_partial_rollout": rollout.mask_offpolicy_in_partial_rollout,
        "loss_mask_type": rollout.loss_mask_type.value,
        "rollout_temperature": sampling.rollout_temperature,
        "rollout_top_p": sampling.rollout_top_p,
        "rollout_top_k": sampling.rollout_top_k,
        "rollout_max_response_len": sampling.rollout_max_response_len,
        "rollout_max_context_len": sampling.rollout_max_context_len,
        "rollout_stop": list(sampling.rollout_stop) or None,
        "rollout_stop_token_ids": list(sampling.rollout_stop_token_ids) or None,
        "rollout_skip_special_tokens": sampling.rollout_skip_special_tokens,
        "use_rollout_routing_replay": sampling.return_routed_experts,
        "rollout_seed": config.seed,
        "seed": config.seed,
        "rm_type": reward.rm_type,
        "rm_url": reward.remote.url,
        "reward_key": reward.reward_key,
        "eval_reward_key": reward.reward_key,
        "grpo_std_normalization": config.advantage.divide_by_std,
    }


def _of_plugins(config: RolloutConfig) -> dict[str, Any]:
    own = config.plugins
    filters = own.group_filters

    def path(given: Any) -> str | None:
        """Return the path as slime has it; None for functions that are not written for slime."""
        return given.partition(":")[2] if is_slime_path(given) else None

    return {
        "custom_generate_function_path": path(own.generate),
        "custom_rm_path": path(own.reward or own.batched_reward or own.group_reward),
        "group_rm": own.group_reward is not None,
        "dynamic_sampling_filter_path": path(filters[0]) if filters else None,
        "over_sampling_filter_path": path(own.batch_filter),
        "buffer_filter_path": path(own.buffer_policy),
        "data_source_path": path(own.prompt_source),
        "rollout_function_path": path(own.rollout),
        "rollout_sample_hook_path": [path(own.sample_hook)] if own.sample_hook else [],
        "custom_reward_post_process_path": path(own.advantage),
        "rollout_sample_filter_path": None,
        "rollout_all_samples_process_path": None,
    }


def _of_settings(settings: Settings) -> dict[str, Any]:
    prompts, model, evaluation = settings.prompts, settings.model, settings.eval
    dataset = prompts.datasets[0] if prompts.datasets else None
    sampling = settings.sampling

    def of_eval(name: str, otherwise: Any) -> Any:
        given = getattr(evaluation, name)
        return otherwise if given is None else given

    values = {
        "hf_checkpoint": model.checkpoint,
        "apply_chat_template_kwargs": dict(model.chat_template_kwargs),
        "prompt_data": dataset.path if dataset else None,
        "input_key": dataset.input_key if dataset else None,
        "label_key": dataset.label_key if dataset else None,
        "metadata_key": dataset.metadata_key if dataset else None,
        "tool_key": dataset.tools_key if dataset else None,
        "apply_chat_template": dataset.apply_chat_template if dataset else True,
        "rollout_max_prompt_len": settings.max_prompt_length,
        "rollout_max_context_len": settings.max_context_length,
        "rollout_shuffle": prompts.rollout_shuffle,
        "num_epoch": prompts.num_epoch,
        "eval_datasets": [],
        "eval_reward_key": of_eval("eval_reward_key", settings.reward.reward_key),
        "n_samples_per_eval_prompt": of_eval("n_samples_per_prompt", settings.rollout.n_samples_per_prompt),
        "eval_temperature": of_eval("temperature", sampling.rollout_temperature),
        "eval_top_p": of_eval("top_p", sampling.rollout_top_p),
        "eval_top_k": of_eval("top_k", sampling.rollout_top_k),
        "eval_max_response_len": of_eval("max_response_len", sampling.rollout_max_response_len),
        "eval_max_prompt_len": of_eval("max_prompt_len", None),
        "eval_max_context_len": of_eval("max_context_len", None),
        "eval_min_new_tokens": of_eval("min_new_tokens", None),
    }
    return {**values, **_engine_address(settings)}


def _engine_address(settings: Settings) -> Mapping[str, Any]:
    sglang = settings.engine.sglang
    if sglang is None:
        return {}
    url = urlsplit(sglang.router or sglang.workers[0])
    concurrency = {} if sglang.concurrency is None else {"sglang_server_concurrency": sglang.concurrency}
    return {"sglang_router_ip": url.hostname, "sglang_router_port": url.port or 80, **concurrency}
