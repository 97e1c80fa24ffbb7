"""Problems of an environment: made from derived seeds, in variants, some of them held out of training.

Invariants: a task depends on (run seed, split, environment, version, level, index) and nothing else; no global random
state is read or written. Which side a problem is on depends on its question, the environment and the level, and on no
run, split, index or process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, runtime_checkable

from rollfeed.errors import ConfigError
from rollfeed.protocols import Environment, MultiTurnEnvironment, Task
from rollfeed.seeds import derive_seed
from rollfeed.types.text import well_formed, well_formed_json

TRAIN = "train"
"""The split that training draws from; problems of every other split are held out of it."""
HELD_OUT_SHARE = 0.2
"""Of all problems of a level."""
CENSUS_SIZE = 200
"""Problems that are looked at before a level counts as having none on one side: of a large level 1 in 10^19 does."""
_PICTURES = "pictures"
CENSUS = "census"
"""The split of these, made under run seed 0."""


class NoProblemError(ValueError):
    """An environment returned something else than a problem."""


class HasLevels(Protocol):
    """Anything with levels: an environment, or what is known of one."""

    @property
    def environment_id(self) -> str:
        """Its id."""

    @property
    def max_level(self) -> int | None:
        """The hardest level, or None when there is always a harder one."""


@runtime_checkable
class HasParameters(Protocol):
    """An environment with parameters that a settings file can set. *Extension point*, optional."""

    def with_parameters(self, parameters: Mapping[str, Any]) -> Environment:
        """Return the environment with some of its parameters changed.

        Raises:
            ConfigError: If there is no such parameter, or a value is out of its bounds.
        """


@runtime_checkable
class HasSplits(Protocol):
    """An environment that says itself which problems are held out. *Extension point*, optional.

    Without it :func:`held_out_rule` does, by what a problem asks: for environments in which differently asked problems
    are the same.
    """

    def for_split(self, split: str) -> Environment:
        """Return the environment that makes the problems of a split; those of ``train`` are in no other."""


@runtime_checkable
class HasGuessRate(Protocol):
    """An environment that says how often an answer is right that solves nothing. *Extension point*, optional."""

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the lowest and the highest share of a level's problems that blind answers solve.

        Blind are one answer for all problems, the answer to another problem, and what the question lists, unread.
        """


def with_parameters(environment: Environment, parameters: Mapping[str, Any]) -> Environment:
    """Return the environment with these parameters; itself where there are none.

    Raises:
        ConfigError: If it has no parameters, or not these.
    """
    if not parameters:
        return environment
    if not isinstance(environment, HasParameters):
        raise ConfigError(
            f"environment {environment.environment_id}: has no parameters, so {', '.join(sorted(parameters))} cannot "
            "be set: remove parameters"
        )
    return environment.with_parameters(parameters)


def make_task(environment: Environment, *, level: int, index: int, run_seed: int, split: str = TRAIN) -> Task:
    """Make problem number ``index`` of a level; tasks of different splits never share a seed.

    Whether the problem is of the split is not asked: see :func:`held_out_rule`.

    Raises:
        ConfigError: If the environment has no such level.
        NoProblemError: If the environment returns none.
        Exception: Whatever the environment raises when it cannot make the problem.
    """
    check_level(environment, level)
    seed = derive_seed(run_seed, split, environment.environment_id, environment.version, level, index)
    made_by = environment.for_split(split) if isinstance(environment, HasSplits) else environment
    question, params, answer = checked_problem(made_by.make(level, Random(seed)))
    params, pictures = without_pictures(stored(params))
    hides = isinstance(environment, MultiTurnEnvironment)
    return Task(
        environment=environment.environment_id,
        version=environment.version,
        level=level,
        seed=seed,
        question=well_formed(question),
        params=params,
        answer=None if answer is None else well_formed(answer),
        hidden="".join([hidden_text(params) if hides else "", *map(_digest, pictures)]),
        pictures=pictures,
    )


def checked_problem(made: Any) -> tuple[str, dict[str, Any], str | None]:
    """Return what ``make`` returned. Raises NoProblemError if it is no question, params and answer."""
    match made:
        case (str(question), dict(params), None | str() as answer) if question.strip():
            return question, params, answer
    raise NoProblemError(f"make returned {made!r:.80}; it must return question, params and answer or None")


def hidden_text(params: Mapping[str, Any]) -> str:
    """Return what tells a problem from others that ask the same question."""
    return json.dumps(params, sort_keys=True)


def without_pictures(params: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return params without their pictures, which a store has once by their content, and these."""
    match params.get(_PICTURES):
        case [*pictures] if pictures and all(isinstance(each, str) and each.startswith("data:") for each in pictures):
            return {name: value for name, value in params.items() if name != _PICTURES}, tuple(pictures)
    return params, ()


def _digest(picture: str) -> str:
    return hashlib.sha256(picture.encode()).hexdigest()


def stored(params: dict[str, Any]) -> dict[str, Any]:
    """Return parameters as a verifier will get them after they were stored.

    Raises:
        ValueError: If they cannot be; or TypeError.
    """
    read: dict[str, Any] = well_formed_json(json.loads(json.dumps(params, allow_nan=False)))
    return read


def check_level(environment: HasLevels, level: int) -> None:
    """Raise ConfigError unless the environment has the level."""
    hardest = environment.max_level
    if level < 0 or (hardest is not None and level > hardest):
        levels = "0 and up" if hardest is None else f"0 to {hardest}"
        raise ConfigError(f"environment {environment.environment_id}: level = {level}: its levels are {levels}")


@dataclass(frozen=True, slots=True)
class HeldOutRule:
    """Problems whose hash is below a threshold are held out."""

    threshold: int

    def is_of(self, identity: str, split: str) -> bool:
        """Whether a problem is of a split."""
        return (problem_hash(identity) < self.threshold) is (split != TRAIN)


def problem_hash(identity: str) -> int:
    """Return 64 bits that depend on what a problem asks, and hides."""
    return derive_seed("problem", identity)


class Census:
    """Finds what is held out of training at a level, from its first :data:`CENSUS_SIZE` problems, or fewer.

    A fifth of all problems is. Where all of a level's problems would be on one side, as may be of the few of a small
    level, one alone is on the other: the one with the lowest hash is held out, or the one with the highest is trained
    on. The only problem of a level is trained on, and none is held out.
    """

    def __init__(self) -> None:
        self._share = HeldOutRule(int(HELD_OUT_SHARE * 2**64))
        self._hashes: set[int] = set()

    def count(self, task: Task) -> bool:
        """Take in a problem; return whether there are some on either side, so that no other need be looked at."""
        self._hashes.add(problem_hash(task.identity))
        return min(self._hashes) < self._share.threshold <= max(self._hashes)

    @property
    def rule(self) -> HeldOutRule:
        """The rule by what was counted."""
        threshold, hashes = self._share.threshold, self._hashes
        if not hashes or min(hashes) < threshold <= max(hashes):
            return self._share
        if len(hashes) == 1:
            return HeldOutRule(0)
        return HeldOutRule(min(hashes) + 1 if min(hashes) >= threshold else max(hashes))


def held_out_rule(environment: Environment, level: int) -> HeldOutRule | None:
    """Return what is held out of training at a level; None where the environment has splits of its own."""
    if isinstance(environment, HasSplits):
        return None
    census = Census()
    for index in range(CENSUS_SIZE):
        try:
            task = make_task(environment, level=level, index=index, run_seed=0, split=CENSUS)
        except Exception:  # of another package perhaps; the source that meets it tells
            continue
        if census.count(task):
            break
    return census.rule
