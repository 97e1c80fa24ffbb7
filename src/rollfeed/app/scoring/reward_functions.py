"""Reward functions of users, as the hub is to call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rollfeed import plugins
from rollfeed.base.importing import import_object, is_async
from rollfeed.config import RewardSettings
from rollfeed.protocols import Workers
from rollfeed.rewards.by_name import Takes, by_name
from rollfeed.rewards.functions import in_workers


def load_reward_function(
    given: Any,
    protocol: type[Any],
    takes: Takes,
    key: str,
    *,
    settings: RewardSettings,
    workers: Workers,
    folders: Sequence[Path],
    label_names: Sequence[str] = (),
) -> Any:
    """Return a reward function as the hub is to call it: in workers if it is named by its path and not async.

    ``key`` is the setting that gives it and ``takes`` its arguments, unless their names say others, such as those of
    ``label_names``; None stays None.

    Raises:
        PluginError: If it cannot be imported or does not fit.
    """
    found = import_object(given, key=key, folders=folders) if isinstance(given, str) else given
    function = by_name(found, takes=takes, label_names=label_names)
    if function is found:
        function = plugins.load_plugin(given, protocol, key=key, folders=folders)
    if not isinstance(given, str) or not settings.functions_in_workers or is_async(function):
        return function
    deadline = settings.timeout_seconds
    place = partial(in_workers, given, takes=takes, label_names=label_names, folders=folders, workers=workers)
    placed = place(deadline_seconds=deadline)
    return replace(placed, calls=function)
