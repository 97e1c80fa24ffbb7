"""An environment that workers find by its path; levels say how it misbehaves."""

import os
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from rollfeed.environments.tasks import HELD_OUT_SHARE, problem_hash
from rollfeed.protocols import EnvironmentStep
from rollfeed.types import Correct, Verdict

HANGS, RAISES, NOTHING, DIES, SOMETIMES, SLOW = range(1, 7)


class Moody:
    environment_id: str = "mine/moody"
    version: int = 2
    summary: str = "levels say how it misbehaves; all are well at level 0"
    max_level: int | None = 6

    def __init__(self, highest: int = 9_999, waits_in: str = "") -> None:
        """``waits_in`` is a file: who finds it missing writes its process id there, and waits to be killed."""
        self._highest = highest
        self._waits_in = waits_in

    def with_parameters(self, parameters: Mapping[str, Any]) -> "Moody":
        return type(self)(**parameters)

    def make(self, level: int, random: Random) -> Any:
        number = random.randint(0, self._highest)
        if self._waits_in and level == SLOW and not os.path.exists(self._waits_in):
            with open(f"{self._waits_in}.new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(f"{self._waits_in}.new", self._waits_in)
            time.sleep(3600)
        if level == HANGS or (level == SOMETIMES and number % 8 == 0):
            time.sleep(3600)
        if level == RAISES:
            raise OSError("no dice")
        if level == NOTHING:
            return None
        if level == DIES:
            os._exit(7)
        if level == SLOW:
            time.sleep(0.02)
        return f"Say {number}.", {"number": number}, str(number)

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        right = response == str(params["number"])
        return Verdict(reward=float(right), correct=Correct.YES if right else Correct.NO)


class OneSided(Moody):
    """Has no problem that its hash alone would hold out of training."""

    environment_id: str = "mine/one_sided"

    def make(self, level: int, random: Random) -> Any:
        while True:
            question, params, answer = super().make(level, random)
            if problem_hash(question) >= HELD_OUT_SHARE * 2**64:
                return question, params, answer


class Talk(Moody):
    """Answers back twice; at its levels the second step misbehaves."""

    environment_id: str = "mine/talk"

    def make(self, level: int, random: Random) -> Any:
        number = random.randint(0, self._highest)
        return f"Say {number}.", {"number": number, "level": level}, str(number)

    def start(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**params, "turns": 0, "pid": os.getpid()}

    def step(self, state: Mapping[str, Any], response: str) -> Any:
        if state["turns"] == 0:
            told = {"role": "user", "content": "Again."}
            return EnvironmentStep(state={**state, "turns": 1}, messages=(told,))
        if state["level"] == HANGS:
            time.sleep(3600)
        if state["level"] == RAISES:
            raise OSError("no dice")
        if state["level"] == NOTHING:
            return None
        return EnvironmentStep(verdict=Verdict(reward=0.25, correct=Correct.NO))

    def give_up(self, state: Mapping[str, Any]) -> Verdict:
        return Verdict(reward=0.0, correct=Correct.NO)
