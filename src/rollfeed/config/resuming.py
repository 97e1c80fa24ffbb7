"""Settings that a run directory holds: read as what they say now, and what may be others when the run is resumed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from copy import deepcopy
from typing import Any

from rollfeed.config.load import validate_settings
from rollfeed.config.rollout import RolloutMode, RolloutSettings
from rollfeed.config.section import Resume
from rollfeed.config.settings import Settings, flatten
from rollfeed.errors import ConfigError


def read_stored(tree: Mapping[str, Any], *, where: str, overrides: Sequence[str] = ()) -> Settings:
    """Build the settings that a run stored, with ``key=value`` overrides; ``where`` names their origin in errors.

    Raises:
        ConfigError: If this version cannot read them, or an override is wrong.
    """
    return validate_settings(as_of_now(tree), where=where, overrides=overrides)


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


def as_of_now(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that a run stored, those of earlier versions as they are called now."""
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


def refusal_of_changes(there: Mapping[str, str], here: Mapping[str, str], *, chosen: Container[str]) -> str | None:
    """Say which settings may not be others when a run is resumed, why, and what to do; None if there is none.

    ``there`` are the settings of the run, ``here`` those that it is resumed with, ``chosen`` the keys that are changed
    on purpose.
    """
    changed = {key for key in there.keys() | here.keys() if there.get(key) != here.get(key)}
    resume = {key: Settings.resume_of(key) for key in changed}
    if "rollout.deterministic" in changed:  # then only one side has those that depend on it
        changed = {key for key in changed if resume[key] is not Resume.FREE_UNLESS_DETERMINISTIC}
    own = {key for key in changed if resume[key] is Resume.ON_PURPOSE}
    refused = sorted(key for key in changed if key not in own or key not in chosen)
    if not refused:
        return None
    # A section that one side does not have is told by its keys, where these are fixed as it is.
    under = {(each.rpartition(".")[0], resume[each]) for each in refused}
    refused = [key for key in refused if (key, resume[key]) not in under]
    told = "; ".join(f"{key} = {there.get(key, 'unset')} there, {here.get(key, 'unset')} here" for key in refused)
    if fixed := [key for key in refused if key not in own]:
        keys_of = defaultdict[str, list[str]](list)
        for key in fixed:
            keys_of[_reason(resume[key])].append(key)
        reasons = "; ".join(
            f"{'each of ' if len(keys) > 1 else ''}{', '.join(keys)} {reason}" for reason, keys in keys_of.items()
        )
        return f"{told}; choose another --out, or replace it with --overwrite ({reasons})"
    remedies = " ".join(f"--set {key}={here.get(key, 'VALUE')}" for key in refused)
    return f"{told}; set it back, or change it on purpose with {remedies}"


def _reason(resume: Resume | None) -> str:
    """Say why a setting is fixed, as what follows its name."""
    if resume is Resume.FREE_UNLESS_DETERMINISTIC:
        return "decides the rounding of answers, and rollout.deterministic = true promises their bytes"
    return "decides what the run is" if resume is None else resume.value
