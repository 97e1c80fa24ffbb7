"""Refuses what a replay cannot do: settings without effect on stored answers, and rewards that are not pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rollfeed.base.importing import import_object, is_async
from rollfeed.config import RewardSettings, Settings
from rollfeed.config.plugins import import_path_of
from rollfeed.config.reward_model import REWARD_MODEL_RM_TYPE
from rollfeed.errors import ConfigError
from rollfeed.rewards.registry import asks_server
from rollfeed.types import Group

_REWARD_PLUGINS = ("reward", "batched_reward", "group_reward")
_REPLAYED = (
    *("reward", "filters", "advantage", "plugins.slime_args", "rollout.mask_truncated"),
    *(f"plugins.{name}" for name in (*_REWARD_PLUGINS, "group_filters", "batch_filter", "advantage")),
    *("rollout.max_staleness", "rollout.staleness_policy"),
)


def check_overrides(overrides: Sequence[str], settings: Settings) -> None:
    """Refuse ``key=value`` that decides nothing that is done again; ``settings`` have them.

    Raises:
        ConfigError: With what can be set.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not any(f"{key}.".startswith(f"{name}.") for name in _REPLAYED):
            raise ConfigError(
                f"--set {override}: a replay answers nothing again, and changes only what is done with answers: "
                f"{', '.join(_REPLAYED)}"
            )
    function = next((name for name in _REWARD_PLUGINS if getattr(settings.plugins, name) is not None), None)
    if function is not None and "reward.rm_type" in (each.partition("=")[0].strip() for each in overrides):
        raise ConfigError(
            f"--set reward.rm_type: plugins.{function} scores, and no grader: unset it with --set plugins.{function}="
        )


def check_purity(settings: Settings, folders: Sequence[Path]) -> None:
    """Refuse settings by which the same answer may have another reward next time.

    Raises:
        ConfigError: With the setting, and what to set where the reward is pure all the same.
        PluginError: If a function cannot be imported.
    """
    if problem := next(_problems(settings, folders), None):
        raise ConfigError(f"{problem}, so that a replay may give other rewards: {_REMEDY}")


_REMEDY = "set reward.pure = true if the same answer always has the same reward, or choose another reward"


def _problems(settings: Settings, folders: Sequence[Path]) -> Iterator[str]:
    reward, functions = settings.reward, settings.plugins
    if reward.pure is False:
        yield "reward.pure = false: the same answer may have another reward"
    if reward.pure is not None:
        return
    for rm_type in reward.rm_types:
        if _asks_server(rm_type, reward):
            yield f"rm_type = {rm_type!r} of [reward] asks a server"
    given = {f"plugins.{name}": getattr(functions, name) for name in _REWARD_PLUGINS}
    given |= {f"reward.functions.{name}": function for name, function in reward.functions.items()}
    for key, function in given.items():
        if is_async(import_object(function, key=key, folders=folders) if isinstance(function, str) else function):
            yield f"{key} = {import_path_of(function)!r} is async and may ask a server or a judge"


def _asks_server(rm_type: str, reward: RewardSettings) -> bool:
    return asks_server(rm_type) or (rm_type == REWARD_MODEL_RM_TYPE and bool(reward.model.servers))


def check_groups(groups: Iterable[Group], settings: Settings) -> None:
    """Refuse prompts that name a reward server themselves. Raises ConfigError."""
    if settings.reward.pure is not None:
        return
    for group in groups:
        rm_type = group.prompt.metadata.get("rm_type")
        if isinstance(rm_type, str) and _asks_server(rm_type, settings.reward):
            raise ConfigError(
                f"prompt {group.prompt.prompt_id}: rm_type {rm_type!r} asks a server, so that a replay may give other "
                f"rewards: {_REMEDY}"
            )
