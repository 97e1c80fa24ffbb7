"""Verifiers of RLVE-Gym's environments, for workers.

Importing this module imports all 400 environments, which takes seconds; workers give it time of its own. Needs the
package rlve-gym.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from rollfeed.answers import Mark, find_answer
from rollfeed.errors import PluginError, RewardError, suggestion
from rollfeed.types import Correct, Verdict

_MARKERS = ("\x02", "\x03")
"""Around the answer that was extracted here: braces inside a box would end RLVE-Gym's own search for it."""
_TOLERANCE = 1e-6
"""Of RLVE-Gym's thresholds."""

_FROM_JSON: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "BucketSorting": lambda it: {"value2count": {int(value): count for value, count in it["value2count"].items()}},
    "Cinema": lambda it: {"gold_answer": tuple(it["gold_answer"])},
    "LargestConvexPolygon": lambda it: {"points": [tuple(point) for point in it["points"]]},
    "QuadMagicItems": lambda it: {"gold_answer": [tuple(counts) for counts in it["gold_answer"]]},
}
"""Parameters whose tuples and integer keys JSON has lost, without which a right answer is taken for a wrong one."""


def _import_environments() -> Mapping[str, Any]:
    # RLVE-Gym imports torch only to seed it before it makes a problem: the real one would cost seconds and memory.
    torch_is_loaded = "torch" in sys.modules
    if not torch_is_loaded:
        sys.modules["torch"] = ModuleType("torch")
    try:
        found: Mapping[str, Any] = importlib.import_module("Gym.environments").identifier2environment
        return found
    except (ImportError, AttributeError) as error:
        raise PluginError(f"RLVE-Gym cannot be imported: {error}; pip install 'rollfeed[rlve]'") from error
    finally:
        if not torch_is_loaded:
            del sys.modules["torch"]


_ENVIRONMENTS = _import_environments()


def verify(problem: Mapping[str, Any], response: str) -> Verdict:
    r"""Return the verdict on a marked answer, ``\boxed{...}`` or ``<answer>...</answer>``; the reward is in [-1, 1].

    Args:
        problem: ``environment``, its name, and ``config``, as RLVE-Gym's ``get_config`` returns it.
        response: What the model wrote.

    Raises:
        RewardError: If there is no such environment, or its scorer raises or returns no such reward.
    """
    name, config = problem["environment"], problem["config"]
    if name not in _ENVIRONMENTS:
        raise RewardError(f"environment {name!r:.80}: RLVE-Gym has none of that name; {_suggestion(name)}")
    answer = find_answer(response)
    marked = answer.text if answer is not None and answer.mark in (Mark.BOXED, Mark.TAG) else None
    try:
        environment = _ENVIRONMENTS[name](answer_markers=_MARKERS)
        parameter = dict(config["parameter"])
        if name in _FROM_JSON:
            parameter |= _FROM_JSON[name](parameter)
        environment.set_config({"seed": None, **config, "parameter": parameter})
        score = float(environment.scorer("" if marked is None else marked.join(_MARKERS)))
        is_right = score >= environment.passing_reward_threshold - _TOLERANCE
    except Exception as error:  # RLVE-Gym takes it for a wrong answer, and an environment's fault for the model's
        raise RewardError(f"environment {name}: RLVE-Gym raised {type(error).__name__}: {error}") from error
    if not math.isfinite(score) or abs(score) > 1.0:
        raise RewardError(f"environment {name}: RLVE-Gym returned {score}; its rewards are from -1 to 1")
    return Verdict(
        reward=score,
        correct=Correct.YES if is_right else Correct.NO,
        format_ok=score >= -1.0 + _TOLERANCE,
        extracted=None if marked is None else marked[:200],
    )


def _suggestion(name: str) -> str:
    return suggestion(name, _ENVIRONMENTS, otherwise=f"it has {len(_ENVIRONMENTS)}, such as Sorting")
