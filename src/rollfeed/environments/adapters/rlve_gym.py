"""Environments of RLVE-Gym, and their verifiers for rows of data sets, in workers.

Importing this module imports all 400 environments, which takes seconds; workers give it time of its own. Needs the
package rlve-gym.

RLVE-Gym seeds the random states of the process that it is in, and makes problems in threads that go on after their
time. Here they are made without a thread, as a worker can be killed, and random states are as before when that is done.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from types import ModuleType
from typing import Any

from rollfeed.answers import Mark, find_answer
from rollfeed.environments.adapters.entries import version_number
from rollfeed.environments.adapters.formulas import is_formula
from rollfeed.environments.adapters.random_states import own_random_state
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
_SYMBOLIC = ("Differentiate", "Integral")
"""They hand answers to sympy."""
_MISTAKEN = ("PolyaModel",)
"""Their own reference answers are not right."""


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
    if marked is not None and name in _SYMBOLIC and not is_formula(marked):
        marked = None
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


class RlveEnvironment:
    """An environment of RLVE-Gym; a level is one update of its parameters more, and there is always a harder one.

    The reward is RLVE-Gym's, from [-1, 1] to [0, 1]: 0 for an answer that cannot be read, a half for one that is wrong
    where nothing is shaped. RLVE-Gym's own number is in the verdict's detail. Answers have to be marked.
    """

    max_level: int | None = None
    needs_marker: bool = True

    def __init__(self, name: str) -> None:
        self.environment_id = f"rlve/{name}"
        self.version = version_number("rlve-gym")
        self.summary = f"{name}, of RLVE-Gym"
        self._name = name
        self._controller = importlib.import_module("Gym.parameter_controllers").identifier2controller[name]()
        self._parameters = [deepcopy(self._controller.get_parameter_list())]

    def make(self, level: int, random: random.Random) -> tuple[str, dict[str, Any], str | None]:
        """Make a problem from one of the parameters of the level, under a seed of RLVE-Gym's kind."""
        while len(self._parameters) <= level:
            self._controller.update()
            self._parameters.append(deepcopy(self._controller.get_parameter_list()))
        environment = _ENVIRONMENTS[self._name](answer_markers=_MARKERS)
        environment.parameter = deepcopy(random.choice(self._parameters[level]))
        environment.seed = random.getrandbits(32)
        with own_random_state(environment.seed):
            environment._generate()
            if environment.parameter is None:
                raise ValueError("RLVE-Gym found no problem with this seed")
            question = environment.prompt_generator()
        reference = None if self._name in _MISTAKEN else environment.parameter.get("reference_answer")
        answer = str(reference) if isinstance(reference, str | int | float) else None
        if answer is not None and not answer.strip():
            raise ValueError("the answer is empty, which no response can say")
        return question, environment.get_config(), answer

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Return RLVE-Gym's verdict on a marked answer."""
        with own_random_state(0):
            verdict = verify({"environment": self._name, "config": params}, response)
        assert isinstance(verdict.reward, float)
        return replace(verdict, reward=(verdict.reward + 1.0) / 2.0, detail=f"RLVE-Gym: {verdict.reward:g}")
