"""TRL's trainers with rollouts of ours: ``GRPOTrainer(..., rollout_func=rollout_func)``.

``RolloutFunc`` is ``rollout_func`` with settings, ``rollout_reward`` a reward function for the rewards of our rollouts,
and ``AsyncRollouts`` the worker and the weight transfer of ``AsyncGRPOTrainer``. They are made in ``app``, above this
layer; docs/from-trl.md.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["AsyncRollouts", "RolloutFunc", "rollout_func", "rollout_reward"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("rollfeed.app.inside_trl"), name)
