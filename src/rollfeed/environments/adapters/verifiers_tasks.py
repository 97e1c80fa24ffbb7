"""Tasksets of verifiers whose tasks take one turn of text, scored in workers; needs the package verifiers, 0.4.

A response becomes a trace of two messages, on which the task's own rewards are computed, without a harness and without
a runtime: signals that need one are left out, as verifiers itself does.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from random import Random
from typing import Any, Self

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

from rollfeed.environments.adapters.entries import version_number
from rollfeed.errors import ConfigError, RewardError, in_one_line
from rollfeed.types import Verdict

_MAX_TASKS = 1_000_000
_MAX_ENDLESS = 10_000
"""Tasks that are drawn from where a taskset has no end: each is made from the first one on."""


class VerifiersEnvironment:
    """The tasks of a taskset in the order in which it loads them, which has to be the same in all workers.

    The reward is the weighted sum of a task's rewards.

    Args:
        name: Of the module with the taskset.
        parameters: Of the taskset's configuration; and ``right_at`` (1.0), the reward from which on an answer is right.
    """

    max_level: int | None = 0

    def __init__(self, name: str, parameters: Mapping[str, Any] | None = None) -> None:
        self.environment_id = f"vf/{name}"
        self.version = version_number("verifiers")
        self.summary = f"{name}, a taskset of verifiers"
        self._name = name
        self._parameters = {"right_at": 1.0, **(parameters or {})}
        settings = {key: value for key, value in self._parameters.items() if key != "right_at"}
        try:
            taskset = load_taskset(taskset_config_type(name)(id=name, **settings))
        except Exception as error:  # of verifiers or of the module
            raise ConfigError(f"environment {self.environment_id}: cannot be loaded: {in_one_line(error)}") from error
        self._is_endless = not taskset.bounded
        self._coming = iter(taskset)
        self._tasks: list[Any] = []

    def with_parameters(self, parameters: Mapping[str, Any]) -> Self:
        """Return the environment of other parameters. Raises ConfigError if the taskset refuses them."""
        return type(self)(self._name, {**self._parameters, **parameters})

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Draw a task."""
        index = random.randrange(_MAX_ENDLESS if self._is_endless else self._num_loaded(_MAX_TASKS))
        task = self._task(index)
        if type(task).NEEDS_CONTAINER or task.data.prompt is None:
            raise ValueError("the task needs a container, or its user opens the conversation")
        question = "\n\n".join(filter(None, (task.data.system_prompt, task.data.prompt_text)))
        return question, {"index": index, "hash": task.hash, "parameters": self._parameters}, None

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Have the task score a response. Raises RewardError if it is another task by now, or gives no reward."""
        owner = self
        if params["parameters"] != self._parameters:
            owner = _changed(self._name, json.dumps(params["parameters"], sort_keys=True))
        task = owner._task(params["index"])
        if task.hash != params["hash"]:
            raise RewardError(f"task {params['index']} is another one than when the problem was made")
        nodes = [
            vf.MessageNode(message=vf.UserMessage(content=task.data.prompt_text)),
            vf.MessageNode(parent=0, message=vf.AssistantMessage(content=response), sampled=True),
        ]
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace = vf.Trace(task=about, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes, is_completed=True)
        asyncio.run(task.score(trace))
        if not any(each is not None for each in trace.rewards.values()):
            raise RewardError("the task has no reward that needs no runtime")
        reward = float(trace.reward)
        if not math.isfinite(reward):
            raise RewardError(f"the task gave the reward {reward}")
        detail = ", ".join(f"{name} {each.score:g}" for name, each in trace.rewards.items() if each is not None)
        return Verdict.graded(reward >= params["parameters"]["right_at"], reward=reward, detail=detail)

    def _num_loaded(self, wanted: int) -> int:
        """Return how many tasks are loaded, after loading as many as are wanted, where there are so many."""
        self._tasks.extend(islice(self._coming, max(0, wanted - len(self._tasks))))
        return len(self._tasks)

    def _task(self, index: int) -> Any:
        if index >= self._num_loaded(index + 1):
            raise RewardError(f"task {index} is gone: the taskset has {len(self._tasks)}")
        return self._tasks[index]


@lru_cache(maxsize=8)
def _changed(name: str, parameters: str) -> VerifiersEnvironment:
    return VerifiersEnvironment(name, json.loads(parameters))
