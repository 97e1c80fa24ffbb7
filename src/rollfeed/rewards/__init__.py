"""Rewards: graders by ``rm_type``, and the hub that calls them or the user's function.

Names are fetched on first use, so that a worker which compares formulas does not load what talks to servers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollfeed.rewards.calls import OwnPace
    from rollfeed.rewards.functions import Takes, in_workers
    from rollfeed.rewards.graders.deepscaler import MarkerWatch
    from rollfeed.rewards.hub import RewardHub
    from rollfeed.rewards.isolation import InProcessWorkers, IsolatedCall
    from rollfeed.rewards.registry import BUILTIN_GRADERS, BuiltinGrader
    from rollfeed.rewards.remote import RemoteGrader

_HOMES = {
    "calls": ("OwnPace",),
    "functions": ("Takes", "in_workers"),
    "graders.deepscaler": ("MarkerWatch",),
    "hub": ("RewardHub",),
    "isolation": ("InProcessWorkers", "IsolatedCall"),
    "registry": ("BUILTIN_GRADERS", "BuiltinGrader"),
    "remote": ("RemoteGrader",),
}

__all__ = [
    "BUILTIN_GRADERS",
    "BuiltinGrader",
    "InProcessWorkers",
    "IsolatedCall",
    "MarkerWatch",
    "OwnPace",
    "RemoteGrader",
    "RewardHub",
    "Takes",
    "in_workers",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"rollfeed.rewards.{home}"), name)
    raise AttributeError(f"module 'rollfeed.rewards' has no attribute {name!r}")
