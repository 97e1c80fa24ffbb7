from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from rollfeed.environments import make_task
from rollfeed.environments.builtin import BUILTIN_ENVIRONMENTS
from rollfeed.errors import ConfigError


def test_task_can_be_made_again_from_its_place(parity: Any) -> None:
    assert make_task(parity, level=2, index=5, run_seed=1) == make_task(parity, level=2, index=5, run_seed=1)


def test_every_part_of_the_place_changes_the_seed(parity: Any) -> None:
    places = [
        {"level": 0, "index": 0, "run_seed": 0, "split": "train"},
        {"level": 1, "index": 0, "run_seed": 0, "split": "train"},
        {"level": 0, "index": 1, "run_seed": 0, "split": "train"},
        {"level": 0, "index": 0, "run_seed": 1, "split": "train"},
        {"level": 0, "index": 0, "run_seed": 0, "split": "eval"},
    ]
    seeds = {make_task(parity, **place).seed for place in places}  # type: ignore[arg-type]
    parity.version += 1
    seeds.add(make_task(parity, level=0, index=0, run_seed=0).seed)
    parity.environment_id = "my/other"
    seeds.add(make_task(parity, level=0, index=0, run_seed=0).seed)
    assert len(seeds) == 7


def test_halves_of_surrogate_pairs_in_a_problem_become_replacement_characters(
    parity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "make", lambda level, random: ("cut \ud83d", {"a": ["\ud83d"]}, "\udc00"))
    task = make_task(parity, level=0, index=0, run_seed=0)
    assert (task.question, task.params, task.answer) == ("cut \ufffd", {"a": ["\ufffd"]}, "\ufffd")


@pytest.mark.parametrize("level", [-1, 41])
def test_level_that_does_not_exist_is_refused(level: int) -> None:
    add_numbers = next(env for env in BUILTIN_ENVIRONMENTS if env.environment_id == "core/add_numbers")
    with pytest.raises(ConfigError, match=f"core/add_numbers: level = {level}: its levels are 0 to 40"):
        make_task(add_numbers, level=level, index=0, run_seed=0)


def test_params_that_json_cannot_hold_are_refused(parity: Any) -> None:
    class Careless(type(parity)):  # type: ignore[misc]
        def make(self, level: int, random: Any) -> tuple[str, dict[str, Any], str | None]:
            return "?", {"numbers": {1, 2}}, None

    with pytest.raises(TypeError, match="set is not JSON serializable"):
        make_task(Careless(), level=0, index=0, run_seed=0)


def test_tasks_are_the_same_in_processes_with_other_hash_seeds() -> None:
    program = """
import json
from rollfeed.environments import make_task
from rollfeed.environments.builtin import BUILTIN_ENVIRONMENTS
tasks = [make_task(e, level=l, index=i, run_seed=7) for e in BUILTIN_ENVIRONMENTS for l in (0, 9) for i in range(5)]
print(json.dumps([(task.seed, task.question, dict(task.params), task.answer) for task in tasks]))
"""
    here = [
        [task.seed, task.question, dict(task.params), task.answer]
        for environment in BUILTIN_ENVIRONMENTS
        for level in (0, 9)
        for task in (make_task(environment, level=level, index=index, run_seed=7) for index in range(5))
    ]
    for hash_seed in ("1", "2"):
        environ = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)}
        out = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
        assert json.loads(out.stdout) == here
