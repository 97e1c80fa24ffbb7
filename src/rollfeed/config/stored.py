"""Settings that a run directory holds: those of earlier versions are read as what they say now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from rollfeed.config.load import validate_settings
from rollfeed.config.rollout import RolloutMode, RolloutSettings
from rollfeed.config.settings import Settings, flatten
from rollfeed.errors import ConfigError


def read_stored(tree: Mapping[str, Any], *, where: str, overrides: Sequence[str] = ()) -> Settings:
    """Build the settings that a run stored, with ``key=value`` overrides; ``where`` names their origin in errors.

    Raises:
        ConfigError: If this version cannot read them, or an override is wrong.
    """
    return validate_settings(_as_of_now(tree), where=where, overrides=overrides)


def stored_identity(tree: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what :meth:`Settings.identity` says of settings that a run stored; None where they cannot be read.

    Settings that were unknown then are at their defaults, so that a run of an earlier version can be gone on with.
    """
    try:
        identity = read_stored(tree, where="stored settings").identity()
    except ConfigError:
        return None
    return {**identity, **_other_meanings(tree, identity)}


def stored_values(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that a run stored as dotted keys, those of earlier versions as they are called now.

    Settings that cannot be read are as they stand there.
    """
    try:
        values = flatten(read_stored(tree, where="stored settings").model_dump(mode="json"))
    except ConfigError:
        return flatten(dict(tree))
    return {**values, **_other_meanings(tree, values)}


def _other_meanings(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run of before meant by words that mean something else now, by key."""
    if "estimator" in tree.get("advantage", {}):
        return {}
    found: dict[str, str] = {}
    if values["advantage.divide_by_std"]:
        found["advantage.divide_by_std"] = "true, by the standard deviation of n instead of n - 1"
    if (estimator := values["advantage.estimator"]).startswith("reinforce_pp"):
        found["advantage.estimator"] = f"{estimator}, over rollouts instead of tokens"
    return found


def _as_of_now(tree: Mapping[str, Any]) -> dict[str, Any]:
    changed = deepcopy(dict(tree))
    if "advantage" in changed.get("train", {}):
        estimator = changed["train"].pop("advantage")
        of_groups = changed.setdefault("advantage", {})
        of_groups["estimator"] = estimator
        of_groups["divide_by_std"] = of_groups.get("divide_by_std", False) and estimator == "group_mean"
    loss = changed.get("train", {}).get("loss", {})
    if "clip_high" in loss:
        loss.setdefault("dual_clip", 0.0)
    rollout = changed.get("rollout")
    if not isinstance(rollout, dict):
        return changed
    had_limit = rollout.get("mode") == RolloutMode.ASYNC or "mask_offpolicy_finished_members" in rollout
    if not had_limit and rollout.get("max_staleness") == 4:
        del rollout["max_staleness"]  # the default, which had no effect in other modes
    if "failure_window" not in rollout and "failure_budget" in rollout:
        # It was the number of failures that a whole run could have.
        count = rollout.pop("failure_budget")
        fields = RolloutSettings.model_fields
        if count == 0:
            rollout["failure_budget"] = 0.0
        rollout["failure_minimum"] = min(count + 1, fields["failure_window"].default)
    return changed
