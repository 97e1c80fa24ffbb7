"""slime's flags for prompts, rollouts, rewards and servers, where one flag is not one setting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollfeed.compat.convert.draft import Draft, name_columns
from rollfeed.compat.convert.eval_config import compose_file, plain_value, table_of
from rollfeed.compat.convert.evaluation_rules import set_evaluation
from rollfeed.compat.convert.table import FLAGS
from rollfeed.compat.convert.teacher_rules import TEACHER_REWARD, set_teacher
from rollfeed.compat.convert.toml_text import Setting
from rollfeed.compat.convert.training_rules import set_advantages, set_tracking, set_training
from rollfeed.errors import CheckpointError
from rollfeed.model_files import find_config

_OWN = re.compile(r"(?:slime|miles)\.")
_DATA_SOURCE = re.compile(r"(?:slime|miles)\..*\b(?:Legacy)?(?:Rollout|Queue)DataSource(?:WithBuffer)?$")
_ROOM_FOR_PROMPTS = 1024
_CONVERSATION = 8192
"""Tokens that a conversation may have, where nothing says it."""
_ENDLESS = 100_000_000
"""``rollout.num_rollout`` of a run that ends with its data."""
_SERVER_KEYS: Mapping[str, str] = {
    "sglang-router-request-timeout-secs": "request_timeout_seconds",
    "rollout-health-check-interval": "probe_interval_seconds",
    "rollout-health-check-timeout": "probe_timeout_seconds",
    "rollout-health-check-first-wait": "startup_timeout_seconds",
    "rollout-health-check-failure-threshold": "probes_until_dead",
    "pause-generation-mode": "weight_update",
    "update-weight-disk-dir": "weights_folder",
}

_RLVE_KEYS = (
    *("initial-difficulty", "difficulty-sliding-window-size", "min-metric-to-increase-difficulty"),
    *("min-prompts-before-difficulty-check", "custom-prompt-preprocessor"),
)


def apply_rules(draft: Draft) -> None:
    """Decide all flags that the table does not carry over by themselves."""
    draft.put("seed", draft.value("rollout-seed"), "rollout-seed")
    draft.mode = _mode(draft)
    for part in (
        _prompts,
        _environments,
        _scheduling,
        _plugins,
        _filters,
        _lengths,
        _rewards,
        _engine,
        set_evaluation,
        set_tracking,
    ):
        part(draft)
    if not draft.value("debug-rollout-only"):
        set_advantages(draft)
        set_training(draft)


def read_custom_config(draft: Draft) -> None:
    """Take the flags that the file of ``--custom-config-path`` sets.

    Raises:
        ConfigError: If it cannot be read, or a value is wrong.
    """
    name = "custom-config-path"
    if not draft.value(name):
        return
    node, source = compose_file(draft.value(name), f"--{name}", folder=draft.folder)
    table = table_of(node, source)
    lines = {key: f"{source}:{place.start_mark.line + 1}" for key, (place, _) in table.items()}
    values = {key: plain_value(value) for key, (_, value) in table.items()}
    draft.flags.merge(values, lines.__getitem__)
    for key, value in values.items():
        if key.replace("_", "-") in FLAGS:
            continue
        if key.isidentifier() and _fits_toml(value):
            draft.settings[f"plugins.slime_args.{key}"] = Setting(value, lines[key], (name,))
        else:
            draft.left_keys.append((f"{lines[key]}: {key}", "TOML has no form for it"))
    draft.left.setdefault(name, "its keys that are flags are carried over as these, others as plugins.slime_args")


def _mode(draft: Draft) -> str:
    """Set ``rollout.mode`` and what paces it."""
    path = draft.value("rollout-function-path") or ""
    is_own = bool(_OWN.match(path)) or path.endswith(".generate_rollout_fully_async")
    is_sft = (is_own and "sft_rollout" in path) or draft.value("loss-type") == "sft_loss"
    overlaps = draft.value("flush-cache-interval") != 1
    is_async = (is_own and "fully_async" in path.lower()) or draft.value("fully-async") or overlaps
    mode = "sft" if is_sft else "async" if is_async or draft.runs_async else "sync"
    mode = "partial" if mode == "sync" and draft.value("partial-rollout") else mode
    names = ("rollout-function-path", "loss-type", "fully-async", "partial-rollout")
    if mode != "sync":
        draft.put("rollout.mode", mode, *names, *(["flush-cache-interval"] if overlaps else []))
    if mode == "async" and draft.runs_async and not is_async:
        draft.settings["rollout.mode"] = Setting(mode, "train_async")
        draft.settings["rollout.max_staleness"] = Setting(1, "train_async: one batch ahead")
    if path and not is_own:
        draft.put("plugins.rollout", f"slime:{path}", "rollout-function-path")
    elif "forge_load" in path:
        draft.leave("rollout-function-path", FLAGS["load-forge-rollout-data"].text)
    if draft.value("loss-type") == "custom_loss":
        draft.leave("loss-type", FLAGS["custom-loss-function-path"].text)
    for name, setting in (
        ("async-max-concurrent-samples", "max_requests_in_flight"),
        ("max-weight-staleness", "max_staleness"),
    ):
        if name in draft.flags and mode == "async":
            draft.put(f"rollout.{setting}", draft.value(name), name)
    if "async-unused-samples-handler" in draft.flags and mode == "async":
        policy = "requeue" if draft.value("async-unused-samples-handler") == "retry" else "drop"
        draft.put("rollout.staleness_policy", policy, "async-unused-samples-handler")
    if mode == "sft":
        kind = draft.value("loss-mask-type")
        draft.put("rollout.loss_mask_type", "generic" if kind == "qwen3_5" else kind, "loss-mask-type")
    elif "loss-mask-type" in draft.flags:
        draft.leave("loss-mask-type", "only conversations that are learned as they stand have such masks")
    return mode


def _prompts(draft: Draft) -> None:
    source, path = draft.value("data-source-path"), draft.value("prompt-data")
    if source and not _DATA_SOURCE.search(source):
        draft.put("plugins.prompt_source", f"slime:{source}", "data-source-path")
        for name in ("prompt-data", "input-key", "label-key", "metadata-key", "tool-key", "multimodal-keys"):
            if path and draft.value(name) is not None:
                draft.put(f"plugins.slime_args.{name.replace('-', '_')}", draft.value(name), name)
        if draft.value("rollout-all-samples-process-path"):
            name = "rollout-all-samples-process-path"
            draft.put(f"plugins.slime_args.{name.replace('-', '_')}", draft.value(name), name)
    elif path and not draft.value("disable-rollout-global-dataset"):
        at = "prompts.datasets.0."
        draft.put(f"{at}path", path, "prompt-data")
        name_columns(draft, at, path, "")
        renders = draft.value("apply-chat-template") or draft.mode == "sft"
        draft.put(f"{at}apply_chat_template", renders, "apply-chat-template")
    elif path:
        draft.leave("prompt-data", "--disable-rollout-global-dataset turns it off")
    if draft.value("num-rollout") is not None:
        draft.put("rollout.num_rollout", draft.value("num-rollout"), "num-rollout")
        draft.leave("num-epoch", "--num-rollout goes before it")
    elif draft.value("num-epoch") is not None:
        draft.put("prompts.num_epoch", draft.value("num-epoch"), "num-epoch")
        draft.settings["rollout.num_rollout"] = Setting(_ENDLESS, "the run ends with the data")


def _environments(draft: Draft) -> None:
    """Carry over RLVE's environments, whose names are those of RLVE-Gym."""
    names = draft.value("environment-list")
    if not draft.value("rlve") or not names:
        for name in ("rlve", "environment-list", *_RLVE_KEYS):
            if name in draft.flags:
                draft.leave(name, "--rlve takes its problems from --environment-list: give both")
        return
    at = "prompts.adaptive."
    draft.put(f"{at}policy", "rlve", "rlve")
    draft.put(f"{at}environment_list", [name if "/" in name else f"rlve/{name}" for name in names], "environment-list")
    for name in _RLVE_KEYS:
        if name in draft.flags:
            draft.put(f"{at}{name.replace('-', '_')}", draft.value(name), name)
    draft.put(f"{at}apply_chat_template", draft.value("apply-chat-template"), "apply-chat-template")


def _scheduling(draft: Draft) -> None:
    draft.put("rollout.n_samples_per_prompt", draft.value("n-samples-per-prompt"), "n-samples-per-prompt")
    masks = "mask-offpolicy-in-partial-rollout"
    if draft.value(masks) and draft.mode == "partial":
        draft.put("rollout.mask_offpolicy_in_partial_rollout", True, masks)
        draft.put("rollout.mask_offpolicy_finished_members", True, masks)
    elif masks in draft.flags:
        draft.leave(masks, 'it is for --partial-rollout; in `async` mode rollout.staleness_policy = "mask" masks')
    if draft.value("rollout-submission-granularity") == "sample" and draft.mode != "sft":
        draft.put("rollout.refill_counts", "in_flight", "rollout-submission-granularity")
    buffer = draft.value("buffer-filter-path")
    if buffer and _OWN.match(buffer) and buffer.endswith("pop_first"):
        draft.put("buffer.policy", "fifo", "buffer-filter-path")
    elif buffer:
        draft.put("plugins.buffer_policy", f"slime:{buffer}", "buffer-filter-path")
    elif draft.value("buffer-sort-by-staleness"):
        draft.put("buffer.policy", "max_staleness", "buffer-sort-by-staleness")


def _plugins(draft: Draft) -> None:
    if draft.value("custom-generate-function-path"):
        path = draft.value("custom-generate-function-path")
        draft.put("plugins.generate", f"slime:{path}", "custom-generate-function-path")
    if path := draft.value("rollout-sample-filter-path"):
        draft.put("plugins.slime_args.rollout_sample_filter_path", path, "rollout-sample-filter-path")
    hooks = draft.value("rollout-sample-hook-path") or []
    if len(hooks) == 1:
        draft.put("plugins.sample_hook", f"slime:{hooks[0]}", "rollout-sample-hook-path")
    elif hooks:
        draft.leave("rollout-sample-hook-path", "there is one hook: write one that calls these in turn")
    evaluation, rollout = draft.value("eval-function-path"), draft.value("rollout-function-path")
    if evaluation and evaluation != rollout and not _OWN.match(evaluation):
        draft.leave("eval-function-path", FLAGS["eval-function-path"].text)


def _filters(draft: Draft) -> None:
    path = draft.value("dynamic-sampling-filter-path")
    names = {"check_reward_nonzero_std": {}, "check_reward_nonzero_std_with_fallback": {"keep_when_short": True}}
    built_in = names.get(path.rpartition(".")[2]) if path and _OWN.match(path) else None
    if built_in is not None:
        for key, value in {"name": "reward_std", **built_in}.items():
            draft.put(f"filters.dynamic_sampling.0.{key}", value, "dynamic-sampling-filter-path")
    elif path:
        draft.put("plugins.group_filters", [f"slime:{path}"], "dynamic-sampling-filter-path")
    path = draft.value("over-sampling-filter-path")
    batch, submitted = draft.value("rollout-batch-size") or 4, draft.value("over-sampling-batch-size") or 0
    if path and submitted <= batch:
        draft.leave("over-sampling-filter-path", "needs --over-sampling-batch-size above --rollout-batch-size")
    elif path and _OWN.match(path) and path.endswith("sort_by_reward_std"):
        draft.put("filters.over_sampling.name", "reward_std", "over-sampling-filter-path")
    elif path:
        draft.put("plugins.batch_filter", f"slime:{path}", "over-sampling-filter-path")


def _lengths(draft: Draft) -> None:
    top_p, top_k = draft.value("rollout-top-p"), draft.value("rollout-top-k")
    if "rollout-top-p" in draft.flags:
        draft.put("sampling.rollout_top_p", top_p, "rollout-top-p")
    if top_p < 1.0 and 1 < top_k <= 4096 and draft.mode != "sft":
        draft.put("sampling.return_sampling_mask", True, "rollout-top-p", "rollout-top-k")
    draft.is_restricted = (top_p < 1.0 or top_k != -1) and "sampling.return_sampling_mask" not in draft.settings
    context, prompt = draft.value("rollout-max-context-len"), draft.value("rollout-max-prompt-len")
    response = draft.value("rollout-max-response-len") or 128
    if context is not None:
        draft.put("sampling.rollout_max_context_len", context, "rollout-max-context-len")
    if prompt is not None and draft.mode != "sft":
        most = prompt if context is None else min(prompt, context - response)
        if most < prompt:
            draft.notes.append(f"--rollout-max-prompt-len {prompt}: beside responses of {response}, {most} fit")
        draft.put("prompts.rollout_max_prompt_len", max(most, 1), "rollout-max-prompt-len")
    longest = max(response, draft.value("eval-max-response-len") or 0)
    limits = [context or 0, draft.value("eval-max-context-len") or 0, draft.value("sglang-context-length") or 0]
    total = max(*limits, longest + max(prompt or 0, draft.value("eval-max-prompt-len") or 0, 0 if context else 1))
    if not any(limits) and prompt is None:
        is_sft, per_gpu = draft.mode == "sft", draft.value("max-tokens-per-gpu") or 0
        total = max(per_gpu, _CONVERSATION) if is_sft else longest + _ROOM_FOR_PROMPTS
        total = min(total, _longest_of(draft.value("hf-checkpoint") or "") or total)
        room = "conversations" if is_sft else f"prompts beside {response} of responses"
        draft.notes.append(
            f"no length of prompts or of the context is given: engine.context_length = {total} holds {room}; longer "
            "ones are left out and counted"
        )
    names = (
        "sglang-context-length",
        "rollout-max-context-len",
        "rollout-max-prompt-len",
        "rollout-max-response-len",
    )
    draft.put("engine.context_length", total, *names, "eval-max-context-len", "eval-max-response-len")
    if not draft.settings["engine.context_length"].flags:
        draft.settings["engine.context_length"] = Setting(total, "not given")
    draft.context_length = total


def _rewards(draft: Draft) -> None:
    path, is_group = draft.value("custom-rm-path"), draft.value("group-rm")
    is_taught = set_teacher(draft)
    if is_taught and path == TEACHER_REWARD:
        draft.put("teacher.use", "loss", "use-opd", "opd-type", "custom-rm-path")
    elif path:
        key = "group_reward" if is_group else "reward"
        draft.put(f"plugins.{key}", f"slime:{path}", "custom-rm-path", "group-rm")
    elif is_group:
        draft.leave("group-rm", "graders score each answer; a group is given to the function of --custom-rm-path")
    if draft.value("rm-url") and not is_taught:
        draft.put("reward.remote.url", draft.value("rm-url"), "rm-url")
    if draft.value("rm-type") == "remote_rm":
        draft.put("reward.remote.max_tries", 10)
        draft.put("reward.remote.timeout_seconds", 120.0)


def _engine(draft: Draft) -> None:
    workers = draft.value("rollout-external-engine-addrs")
    ip, port = draft.value("sglang-router-ip"), draft.value("sglang-router-port")
    if workers:
        draft.put("engine.sglang.workers", [_address(each) for each in workers], "rollout-external-engine-addrs")
    elif ip and port is None:
        draft.leave("sglang-router-ip", "without --sglang-router-port it is no address")
        ip = None
    elif ip:
        draft.put("engine.sglang.router", _address(f"{ip}:{port}"), "sglang-router-ip", "sglang-router-port")
    num_engines = len(workers or ()) or (draft.value("rollout-num-gpus") or 1) // draft.value(
        "rollout-num-gpus-per-engine"
    )
    name = "sglang-server-concurrency"
    if name in draft.flags and "rollout.max_requests_in_flight" not in draft.settings:
        draft.put("rollout.max_requests_in_flight", draft.value(name) * max(num_engines, 1), name)
    for name, key in _SERVER_KEYS.items():
        if name not in draft.flags:
            continue
        if workers or ip:
            value = draft.value(name)
            draft.put(f"engine.sglang.{key}", float(value) if key.endswith("seconds") else value, name)
        else:
            draft.leave(name, "no servers are named: it is for those of [engine.sglang]")
    if draft.value("flush-cache-interval") != 1 and (workers or ip):
        draft.put("engine.sglang.weight_update", "in_place", "flush-cache-interval")
    if not (workers or ip) and draft.mode != "sft":
        draft.notes.append("no servers are named: the embedded engine answers; for servers add [engine.sglang]")


def _fits_toml(value: Any) -> bool:
    """Whether TOML and JSON both have the value: nothing is missing in it, and it has no dates."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _fits_toml(each) for key, each in value.items())
    return all(map(_fits_toml, value)) if isinstance(value, list) else isinstance(value, str | int | float)


def _longest_of(checkpoint: str) -> int | None:
    """Return how many tokens a model can read that is here; None for others."""
    try:
        config = find_config(Path(checkpoint).expanduser()) or {}
        longest = config.get("text_config", config).get("max_position_embeddings")
    except (CheckpointError, AttributeError):
        return None
    return longest if isinstance(longest, int) else None


def _address(text: str) -> str:
    return text if "://" in text else f"http://{text}"
