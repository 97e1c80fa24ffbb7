"""The rollout function that scripts of slime and miles name.

``--rollout-function-path rollfeed.compat.slime_rollout.generate_rollout``, and ``--eval-function-path`` with the same.
It is made in ``app``, above this layer, and found there by its path, as slime finds this one; docs/inside-slime.md.
"""

from __future__ import annotations

import importlib
from typing import Any


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Make a step or an evaluation; see :func:`rollfeed.app.inside_slime.generate_rollout`."""
    made = importlib.import_module("rollfeed.app.inside_slime")
    return made.generate_rollout(args, rollout_id, data_source, evaluation)
