"""Problems of an environment, each made from a derived seed.

Invariant: a task depends on (run seed, split, environment, version, level, index) and nothing else; no global
random state is read or written.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from rollfeed.environments.variants import for_split
from rollfeed.errors import ConfigError
from rollfeed.protocols import Environment, Task
from rollfeed.seeds import derive_seed
from rollfeed.types.text import well_formed, well_formed_json


def make_task(environment: Environment, *, level: int, index: int, run_seed: int, split: str = "train") -> Task:
    """Make problem number ``index`` of a level; tasks of different splits never share a seed.

    Whether the problem is of the split is not asked: see :mod:`rollfeed.environments.held_out`.

    Raises:
        ConfigError: If the environment has no such level.
        Exception: Whatever the environment raises when it cannot make the problem.
    """
    check_level(environment, level)
    seed = derive_seed(run_seed, split, environment.environment_id, environment.version, level, index)
    question, params, answer = for_split(environment, split).make(level, Random(seed))
    return Task(
        environment=environment.environment_id,
        version=environment.version,
        level=level,
        seed=seed,
        question=well_formed(question),
        params=stored(params),
        answer=None if answer is None else well_formed(answer),
    )


def stored(params: dict[str, Any]) -> dict[str, Any]:
    """Return parameters as a verifier will get them after they were stored.

    Raises:
        ValueError: If they cannot be; or TypeError.
    """
    read: dict[str, Any] = well_formed_json(json.loads(json.dumps(params, allow_nan=False)))
    return read


def check_level(environment: Environment, level: int) -> None:
    """Raise ConfigError unless the environment has the level."""
    hardest = environment.max_level
    if level < 0 or (hardest is not None and level > hardest):
        levels = "0 and up" if hardest is None else f"0 to {hardest}"
        raise ConfigError(f"environment {environment.environment_id}: level = {level}: its levels are {levels}")
