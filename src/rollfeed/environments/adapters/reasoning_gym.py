"""Environments of reasoning-gym, in workers; needs the package reasoning-gym.

A problem is made again from its level and index when it is verified: what scorers compare with has tuples and numbers
as keys, and answers that JSON should not carry about. Scorers that can be had cheaply are mended here.
"""

from __future__ import annotations

import math
import re
import sys
from ast import literal_eval
from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any

from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
from reasoning_gym.factory import CURRICULA, DATASETS

from rollfeed.answers import Mark, find_answer, normalize
from rollfeed.environments.adapters.entries import version_number
from rollfeed.environments.adapters.formulas import is_formula
from rollfeed.environments.adapters.random_states import own_random_state
from rollfeed.errors import RewardError
from rollfeed.faults import describe
from rollfeed.types import Verdict

_NUM_PROBLEMS = 2**31
"""Of a data set, of which none is made before it is asked for."""
_AHEAD = ("acre", "gsm_symbolic", "list_functions", "word_ladder")
"""They do something for each problem of a data set beforehand, and get one of a single problem."""
_EVALUATED = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Their scorers evaluate an answer that is not right, to see whether it is a list: here it can be nothing else."""
_SYMBOLIC = (
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
)
"""They hand answers to sympy."""
_RIGHT = 1.0 - 1e-6


class ReasoningGymEnvironment:
    """A data set of reasoning-gym; levels are those of its curriculum, without the easier ones below.

    The reward is reasoning-gym's, and 1 is right. Answers have to be marked. A scorer that raises could not read the
    answer.
    """

    needs_marker: bool = True

    def __init__(self, name: str) -> None:
        self.environment_id = f"rg/{name}"
        self.version = version_number("reasoning-gym")
        self.summary = f"{name}, of reasoning-gym"
        self._name = name
        self._kind, self._config_kind = DATASETS[name]
        if name in _EVALUATED:
            vars(sys.modules[self._kind.__module__])["eval"] = literal_eval
        self.max_level: int | None = self._hardest()
        self._dataset = lru_cache(maxsize=8)(self._new_dataset)
        self._problem = lru_cache(maxsize=64)(self._made_problem)

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Make a problem of a level by an index that is drawn."""
        params = {"level": level, "index": random.randrange(_NUM_PROBLEMS)}
        with own_random_state(params["index"]):
            _, entry = self._problem(**params)
        return entry["question"], params, entry["answer"]

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Make the problem again, and score a marked answer."""
        found = find_answer(response)
        if found is None or found.mark not in (Mark.BOXED, Mark.TAG):
            return Verdict.graded(False, format_ok=False, detail="no answer between marks")
        extracted = found.text[:200]
        with own_random_state(params["index"]):
            dataset, entry = self._problem(params["level"], params["index"])
            try:
                score = max(self._score(dataset, answer, entry) for answer in {found.text, found.text.strip()})
            except Exception as error:  # mostly of reading an answer that is no number
                raised = f"the scorer raised {describe(error)}"
                return Verdict.graded(False, format_ok=False, extracted=extracted, detail=raised)
        if not math.isfinite(score) or score > 1.0:
            raise RewardError(f"reasoning-gym returned {score}; its rewards are from 0 to 1")
        return Verdict.graded(score >= _RIGHT, reward=score, extracted=extracted)

    def _score(self, dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
        if self._name == "game_of_life_halting":  # takes anything for right that is not empty
            return float(answer.lower() == entry["answer"].lower())
        if self._name in _SYMBOLIC and not is_formula(answer):
            return 0.0
        if entry["answer"] is not None and normalize(entry["answer"]).strip() == answer.strip():
            return 1.0  # what was read of the response is normalised
        if self._name == "puzzle24" and _numbers(answer) != sorted(map(str, entry["metadata"]["numbers"])):
            return 0.0  # takes any four numbers
        return float(dataset.score_answer(answer, entry))

    def _made_problem(self, level: int, index: int) -> tuple[Any, Mapping[str, Any]]:
        """Return a problem, and the data set that it is of."""
        seed, number = (index, 0) if self._name in _AHEAD else (0, index)
        dataset = self._dataset(level, seed)
        return dataset, dataset[number]

    def _new_dataset(self, level: int, seed: int) -> Any:
        size = 1 if self._name in _AHEAD else _NUM_PROBLEMS
        return self._kind(config=self._config(level, seed=seed, size=size))

    def _config(self, level: int, **values: int) -> Any:
        if self._name in CURRICULA:
            curriculum = CURRICULA[self._name]()
            curriculum.set_global_level(level)
            hardest_only = DefaultCurriculumContext(mode=RangeAttributeMode.UPPER_BOUND)
            config = curriculum.generate_configuration(values, context=hardest_only)
        else:
            config = self._config_kind(**values)
        if hasattr(config, "validate"):
            config.validate()
        return config

    def _hardest(self) -> int:
        """Return the hardest level whose configuration is valid."""
        if self._name not in CURRICULA:
            return 0
        level = max((len(each.levels) - 1 for each in CURRICULA[self._name]().attributes.values()), default=0)
        while level > 0:
            try:
                self._config(level)
                break
            except Exception:  # a level that reasoning-gym itself refuses
                level -= 1
        return level


def _numbers(text: str) -> list[str]:
    return sorted(re.findall("[0-9]+", text))
