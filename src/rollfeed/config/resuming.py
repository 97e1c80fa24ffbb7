"""What may change where a run is gone on with: the one list, by key.

Every setting is free to change, can be changed on purpose (on the command line, so that no edited file changes it
unnoticed), or is fixed as long as the run lasts. A key ending in ``.*`` stands for all below it that are not named.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from enum import Enum


class Change(Enum):
    """What a setting may do where a run is gone on with."""

    FREE = "free"
    """It decides nothing in the run but how it is computed, watched and met when something fails."""
    FREE_UNLESS_DETERMINISTIC = "free unless deterministic"
    """It decides the rounding of what is sampled: fixed where ``rollout.deterministic`` promises the bytes."""
    ON_PURPOSE = "on purpose"
    """It decides how what is trained goes on, and is often changed on the way."""
    FIXED = "fixed"


CHANGES: Mapping[Change, tuple[str, ...]] = {
    Change.FREE: (
        "model.template_date",  # what the run was told is compared where it is known
        "prompts.num_epoch",
        "rollout.num_rollout",
        "rollout.rollout_timeout_seconds",
        "rollout.watchdog_seconds",
        "rollout.abort_grace_seconds",
        "rollout.group_failure",
        "rollout.failure_retries",
        "rollout.failure_budget",
        "rollout.failure_window",
        "rollout.failure_minimum",
        "rollout.max_draws_per_batch",
        "buffer.max_memory_mb",
        "engine.sglang.*",  # servers come and go, and answer for the same weights
        "engine.openai.*",
        "weights.directory",
        "weights.poll_seconds",
        "weights.proof.*",
        "weights.timeout_seconds",
        "reward.concurrency",
        "reward.workers.num_workers",
        "reward.code.concurrency",
        "reward.remote.url",
        "reward.remote.api_key_env",
        "reward.remote.timeout_seconds",
        "reward.remote.max_tries",
        "reward.remote.concurrency",
        "train.method",  # what it sets has keys of its own
        "train.micro_batch_tokens",
        "train.share_prompts",
        "train.activation_checkpointing",
        "train.threads",
        "train.device",
        "train.checkpoint_interval",
        "train.eval_interval",
        "train.on_non_finite",
        "plugins.tracker",
        "eval.*",  # it measures a run
    ),
    Change.FREE_UNLESS_DETERMINISTIC: (
        "engine.threads",
        "engine.num_slots",
        "engine.kernels",
        "engine.device",
        "rollout.max_requests_in_flight",
    ),
    Change.ON_PURPOSE: (
        "engine.precision",
        "advantage.*",
        "train.loss.*",
        "train.optimizer.*",
        "train.precision",
    ),
}
FIXED: Mapping[str, tuple[str, ...]] = {
    "decides all that is random": ("seed",),
    "decides which model samples and learns": ("model.*",),
    "decides which prompts come": ("prompts.*", "buffer.policy", "placement.*", "plugins.prompt_source"),
    "decides which answers are in a batch": (
        "rollout.rollout_batch_size",
        "rollout.n_samples_per_prompt",
        "rollout.mode",
        "rollout.over_sampling_batch_size",
        "rollout.over_sampling_factor",
        "rollout.refill_granularity",
        "rollout.refill_counts",
        "rollout.max_staleness",
        "rollout.staleness_policy",
        "rollout.mask_offpolicy_in_partial_rollout",
        "rollout.mask_offpolicy_finished_members",
        "rollout.mask_truncated",
        "rollout.deterministic",
        "rollout.surplus",
        "rollout.requeue_aborted",
        "filters.*",
        "plugins.group_filters",
        "plugins.batch_filter",
        "plugins.buffer_policy",
    ),
    "decides how prompts are answered": (
        "sampling.*",
        "engine.context_length",
        "engine.sglang",
        "engine.openai",
        "engine.openai.purpose",
        "weights.source",
        "plugins.generate",
        "plugins.rollout",
        "plugins.sample_hook",
    ),
    "decides what answers are worth": (
        "reward.rm_type",
        "reward.reward_key",
        "reward.timeout_seconds",
        "reward.overlong",
        "reward.overlong.*",
        "reward.override_environments",
        "reward.functions",
        "reward.functions.*",
        "reward.functions_in_workers",
        "reward.workers.timeout_seconds",
        "reward.workers.memory_mb",
        "reward.code.isolation",
        "reward.code.test_timeout_seconds",
        "reward.code.timeout_seconds",
        "reward.code.memory_mb",
        "reward.remote.form",
        "reward.remote.reply_key",
        "plugins.reward",
        "plugins.batched_reward",
        "plugins.group_reward",
        "plugins.advantage",
    ),
    "decides what came before the first batch": ("train.warm_up", "train.warm_up.*"),
    "decides how many updates the schedule of the learning rate has": ("train.num_epochs", "train.num_minibatches"),
}
"""By what stands behind the key in a refusal."""

_DETERMINISTIC = "rollout.deterministic"
_PLACES: Mapping[str, tuple[Change, str]] = {
    **{key: (change, "") for change, keys in CHANGES.items() for key in keys},
    **{key: (Change.FIXED, reason) for reason, keys in FIXED.items() for key in keys},
}


def place_of(key: str) -> str | None:
    """Return the entry of the list that a key falls under; None for one that nobody has placed."""
    if key in _PLACES:
        return key
    parts = key.split(".")
    above = (".".join([*parts[:depth], "*"]) for depth in range(len(parts) - 1, 0, -1))
    return next((entry for entry in above if entry in _PLACES), None)


def change_of(key: str, *, deterministic: bool) -> Change:
    """Return what a setting may do; fixed is what nobody has placed."""
    change, _ = _PLACES.get(place_of(key) or "", (Change.FIXED, ""))
    if change is Change.FREE_UNLESS_DETERMINISTIC:
        return Change.FIXED if deterministic else Change.FREE
    return change


def reason_of(key: str) -> str:
    """Say why a setting is fixed, as what follows its name."""
    change, reason = _PLACES.get(place_of(key) or "", (Change.FIXED, ""))
    if change is Change.FREE_UNLESS_DETERMINISTIC:
        return "decides the rounding of answers, and rollout.deterministic = true promises their bytes"
    return reason or "decides what the run is"


def is_named(key: str, overrides: Iterable[str]) -> bool:
    """Return whether one of ``key=value`` sets a key, a table that it is in, or an entry of its list."""
    names = [override.partition("=")[0].replace(" ", "") for override in overrides]
    return any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in names)


def refusal_of_changes(there: Mapping[str, str], here: Mapping[str, str], *, chosen: Container[str]) -> str | None:
    """Say which settings may not be others where a run is gone on with, why, and what to do; None if there is none.

    Args:
        there: The settings of the run that it does not change unnoticed, as JSON.
        here: Those that it is to go on with.
        chosen: The keys that are changed on purpose.
    """
    changed = {key for key in there.keys() | here.keys() if there.get(key) != here.get(key)}
    if _DETERMINISTIC in changed:  # then only one side has those that depend on it
        changed -= set(CHANGES[Change.FREE_UNLESS_DETERMINISTIC])
    own = {key for key in changed if change_of(key, deterministic=False) is Change.ON_PURPOSE}
    refused = sorted(key for key in changed if key not in own or key not in chosen)
    if not refused:
        return None
    told = "; ".join(f"{key} = {there.get(key, 'unset')} there, {here.get(key, 'unset')} here" for key in refused)
    if fixed := [key for key in refused if key not in own]:
        reasons = "; ".join(f"{key} {reason_of(key)}" for key in fixed)
        return f"{told}; choose another --out, or replace it with --overwrite ({reasons})"
    remedies = " ".join(f"--set {key}={here.get(key, 'VALUE')}" for key in refused)
    return f"{told}; set it back, or change it on purpose with {remedies}"
