"""Tasksets of verifiers: with a package of its shape here, and the real one where it is installed.

``ROLLFEED_VERIFIERS_PYTHON`` names a Python that has rollfeed and verifiers 0.4.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rollfeed.environments import EnvironmentGrader, EnvironmentRegistry
from rollfeed.environments.making import PooledTaskMaker, describe_environments
from rollfeed.errors import ConfigError, PluginError, WorkerError
from rollfeed.types import Correct
from rollfeed.workers import WorkerPool

PYTHON = os.environ.get("ROLLFEED_VERIFIERS_PYTHON", "")

REAL = """
import verifiers.v1 as vf

class DoubleData(vf.TaskData):
    answer: str

class DoubleTask(vf.Task[DoubleData]):
    @vf.reward(weight=1.0)
    async def right(self, task, trace) -> float:
        return float(trace.nodes[-1].message.content.strip().endswith(task.answer + "."))

class Doubles(vf.Taskset[DoubleTask]):
    def load(self):
        for number in range(7, 57):
            yield DoubleTask(DoubleData(prompt=f"What is 2 * {number}?", answer=str(2 * number)), self.config.task)

__all__ = ["Doubles"]
"""

V1 = """
class Message:
    def __init__(self, **fields):
        self.__dict__.update(fields)

class Trace(Message):
    rewards = {}
    @property
    def reward(self):
        return sum(each.score for each in self.rewards.values() if each is not None)

UserMessage = AssistantMessage = MessageNode = TraceTask = AgentInfo = AgentConfig = Message
"""
LOADERS = """
from verifiers.v1 import Message

class Config:
    def __init__(self, id, first=1):
        assert id == "doubles", f"there is no {id}"
        self.first = int(first)

class Task:
    NEEDS_CONTAINER = False

    def __init__(self, number):
        self.data = Message(system_prompt="Be brief.", prompt="", prompt_text=f"What is 2 * {number}?")
        self.hash = self.key = str(number)

    async def score(self, trace):
        said = trace.nodes[1].message.content
        assert trace.nodes[1].parent == 0 and trace.nodes[1].sampled
        score = {"nan": float("nan"), "half": 0.5}.get(said, float(said == str(2 * int(self.hash))))
        trace.rewards = {"right": None if said == "later" else Message(score=score)}

class Taskset:
    bounded = True
    def __init__(self, config):
        self.first = config.first
    def __iter__(self):
        return map(Task, range(self.first, self.first + 20))

def taskset_config_type(name):
    return Config

load_taskset = Taskset
"""
FILES = {
    "__init__.py": "",
    "v1/__init__.py": V1,
    "v1/utils/__init__.py": "",
    "v1/utils/loaders.py": LOADERS,
    "../verifiers-0.4.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: verifiers\nVersion: 0.4.0\n",
}


@pytest.fixture
def package(install: Callable[[str, Mapping[str, str]], None]) -> None:
    """A package of the shape of verifiers is installed."""
    install("verifiers", FILES)


@pytest.mark.usefixtures("package")
async def test_tasks_score_the_responses_to_them(workers: WorkerPool) -> None:
    parameters = {"first": 30, "right_at": 0.5}
    (facts,) = await describe_environments([("vf/doubles", parameters)], workers=workers)
    assert (facts.version, facts.max_level) == (4_000, 0)
    turns = asyncio.Semaphore(1)
    maker = PooledTaskMaker(
        facts, run_seed=1, parameters=parameters, workers=workers, turns=turns, deadline_seconds=30.0
    )
    async with maker:
        task = await maker.make(level=0, index=0)
    number = 30 + task.params["index"]
    assert task.question == f"Be brief.\n\nWhat is 2 * {number}?"

    grader = EnvironmentGrader(EnvironmentRegistry(), workers=workers, deadline_seconds=30.0)
    metadata = {"environment": "vf/doubles", "params": task.params}
    verdicts = [await grader(text, None, metadata) for text in (str(2 * number), "half", "60 or so")]
    assert [(each.reward, each.correct, each.detail) for each in verdicts] == [
        (1.0, Correct.YES, "right 1"),
        (0.5, Correct.YES, "right 0.5"),
        (0.0, Correct.NO, "right 0"),
    ]
    for text, message in (("nan", "gave the reward nan"), ("later", "no reward that needs no runtime")):
        with pytest.raises(WorkerError, match=message):
            await grader(text, None, metadata)
    other = {**task.params, "hash": "0"}
    with pytest.raises(WorkerError, match="is another one than when the problem was made"):
        await grader("60", None, {"environment": "vf/doubles", "params": other})
    with pytest.raises(PluginError, match="there is no triples"):
        await describe_environments([("vf/triples", {})], workers=workers)
    with pytest.raises(PluginError, match="unexpected keyword argument 'last'"):
        await describe_environments([("vf/doubles", {"last": 3})], workers=workers)


def test_without_the_package_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"verifiers is not installed here: pip install 'rollfeed\[verifiers\]'"):
        EnvironmentRegistry().get("vf/doubles")


@pytest.mark.soak
@pytest.mark.skipif(not PYTHON, reason="ROLLFEED_VERIFIERS_PYTHON names no Python with verifiers")
def test_a_taskset_of_the_package_keeps_what_environments_promise(tmp_path: Path) -> None:
    (tmp_path / "doubles_v1.py").write_text(REAL)
    command = [PYTHON, "-m", "rollfeed", "env", "check", "vf/doubles_v1", "--quiet", "--json"]
    folders = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": folders})
    (report,) = json.loads(done.stdout)["environments"]
    assert (report["outcome"], report["levels"][0]["num_problems"]) == ("passed", 20), report
