"""Environments of reasoning-gym: of a package of its shape here, and the real ones in an environment of their own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rollfeed.environments import EnvironmentGrader, EnvironmentRegistry
from rollfeed.environments.making import PooledTaskMaker, describe_environments
from rollfeed.errors import ConfigError, WorkerError
from rollfeed.protocols import Task
from rollfeed.types import Correct
from rollfeed.workers import WorkerPool

PYTHON = Path(__file__).parents[3] / ".venv-reasoning-gym" / "bin" / "python"

SETS = """
from dataclasses import dataclass
from random import Random
from reasoning_gym.factory import register_dataset

DATASET_NAME = "n_queens"

@dataclass
class Config:
    digits: int = 1
    seed: int = 0
    size: int = 1

    def validate(self):
        assert self.digits < 4, "too many digits"

class Sums:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, index):
        assert 0 <= index < self.config.size
        number = Random(self.config.seed + index).randrange(10 ** (self.config.digits - 1), 10 ** self.config.digits)
        return {"question": f"List {number}.", "answer": f"[{number}]", "metadata": {number: (number,)}}

    def score_answer(self, answer, entry):
        ((number, _),) = entry["metadata"].items()
        if answer == "far":
            return float("nan")
        return 1.0 if answer == entry["answer"] else 0.5 * (int(eval(answer)[0]) == number)

class Levels:
    class Digits:
        levels = [1, 2, 3, 4, 5]

    attributes = {"digits": Digits}

    def set_global_level(self, level):
        self.level = level

    def generate_configuration(self, defaults, context):
        assert context.mode == "upper_bound"
        return Config(digits=1 + self.level, **defaults)

register_dataset(DATASET_NAME, Sums, Config, Levels)
"""
FILES = {
    "factory.py": "DATASETS, CURRICULA = {}, {}\n"
    "def register_dataset(name, dataset, config, curriculum=None):\n"
    "    DATASETS[name] = dataset, config\n    CURRICULA[name] = curriculum\n",
    "coaching/base_curriculum.py": "class RangeAttributeMode:\n    UPPER_BOUND = 'upper_bound'\n"
    "class DefaultCurriculumContext:\n    def __init__(self, mode):\n        self.mode = mode\n",
    "coaching/__init__.py": "",
    "games/sums.py": SETS,
    "games/__init__.py": "from reasoning_gym.games import sums",
    "__init__.py": "from reasoning_gym import games",
    "composite.py": 'DATASET_NAME = "composite"\n',
    "../reasoning_gym-0.1.25.dist-info/METADATA": "Metadata-Version: 2.1\nName: reasoning-gym\nVersion: 0.1.25\n",
}


@pytest.fixture
def package(install: Callable[[str, Mapping[str, str]], None]) -> None:
    """A package of the shape of reasoning-gym is installed."""
    install("reasoning_gym", FILES)


@pytest.mark.usefixtures("package")
async def test_problems_are_made_again_when_they_are_verified(workers: WorkerPool, tmp_path: Path) -> None:
    assert [each for each in EnvironmentRegistry().ids() if each.startswith("rg/")] == ["rg/n_queens"]
    (facts,) = await describe_environments([("rg/n_queens", {})], workers=workers)
    assert (facts.version, facts.max_level, facts.needs_marker) == (1_025, 2, True)
    turns = asyncio.Semaphore(1)
    async with PooledTaskMaker(facts, run_seed=5, workers=workers, turns=turns, deadline_seconds=30.0) as maker:
        task: Task = await maker.make(level=2, index=0)
    assert set(task.params) == {"level", "index"}
    assert "reasoning_gym" not in sys.modules
    answer = str(task.answer)
    assert 100 <= int(answer[1:-1]) <= 999

    grader = EnvironmentGrader(EnvironmentRegistry(), workers=workers, deadline_seconds=30.0)

    async def verdict(text: str) -> tuple[object, Correct, bool]:
        metadata = {"environment": "rg/n_queens", "params": task.params, "version": 1_025}
        found = await grader(text, None, metadata)
        return found.reward, found.correct, found.format_ok

    assert await verdict(rf"\boxed{{{answer}}}") == (1.0, Correct.YES, True)
    assert await verdict(f"<answer> {answer[:-1]}, 0]\n</answer>") == (0.5, Correct.NO, True)
    assert await verdict("<answer>[0]</answer>") == (0.0, Correct.NO, True)
    assert await verdict(answer) == (0.0, Correct.NO, False)
    trace = tmp_path / "trace"
    assert await verdict(f"<answer>[open({str(trace)!r}, 'w')]</answer>") == (0.0, Correct.NO, False)
    assert not trace.exists()
    with pytest.raises(WorkerError, match="reasoning-gym returned nan"):
        await verdict("<answer>far</answer>")


def test_without_the_package_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"not installed here: pip install 'rollfeed\[reasoning-gym\]'"):
        EnvironmentRegistry().get("rg/n_queens")


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.skipif(not PYTHON.exists(), reason="made by `make reasoning-gym`")
def test_real_environments_keep_their_promises_at_their_first_level() -> None:
    command = [str(PYTHON), "-m", "rollfeed", "env", "check", "rg/*", "--levels", "0", "--quiet", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    report = json.loads(done.stdout)
    outcomes = [(each["id"], each["error"], each["levels"]) for each in report["environments"]]
    assert len(outcomes) == 105
    assert report["passed"] >= 95, [each for each in outcomes if each[2:] and each[2][0]["outcome"] != "passed"]
