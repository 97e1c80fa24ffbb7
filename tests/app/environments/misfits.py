"""Environments that break one promise each, for the check of environments."""

from __future__ import annotations

import os
import random as global_random
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from rollfeed.protocols import EnvironmentStep
from rollfeed.types import Correct, Verdict


class Sound:
    """Asks for the double of a number."""

    version = 1
    summary = "double a number"
    max_level: int | None = None

    def __init__(self) -> None:
        self.environment_id = f"bad/{type(self).__name__}"

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        number = random.randrange(10 ** (level + 2))
        return f"Double {number}.", {"number": number}, str(2 * number)

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        claimed = response.removeprefix("<answer>").removesuffix("</answer>").strip()
        return Verdict.graded(claimed == str(2 * params["number"]))


class OtherEachTime(Sound):
    count = 0

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        OtherEachTime.count += 1
        return f"{OtherEachTime.count}?", {"number": OtherEachTime.count}, str(2 * OtherEachTime.count)


class OtherInAnotherProcess(Sound):
    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        number = random.randrange(1000) + hash("salted") % 10**9
        return f"Double {number}.", {"number": number}, str(2 * number)


class DrawsGlobally(Sound):
    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        global_random.random()
        return super().make(level, random)


class ReadsGlobally(Sound):
    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        state = global_random.getstate()
        number = global_random.randrange(1000)
        global_random.setstate(state)
        return f"Double {number}.", {"number": number}, str(2 * number)


class LosesTuples(Sound):
    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        question, params, answer = super().make(level, random)
        return question, {**params, "pair": (1, 2)}, answer

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        return super().verify(params, response) if params["pair"] == (1, 2) else Verdict.graded(False)


class NotJson(Sound):
    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        question, params, answer = super().make(level, random)
        return question, {**params, "never": float("nan")}, answer


class RefusesItsAnswer(Sound):
    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        return Verdict.graded(False)


class TakesAnything(Sound):
    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        return Verdict.graded(bool(response.strip()))


class Guessed(Sound):
    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        number = random.choice([0, 0, 0, 0, 0, 0, 0, 3])
        return f"Double {number}, in case {random.random()}.", {"number": number}, str(2 * number)

    def guess_rate(self, level: int) -> tuple[float, float]:
        return 0.0, 0.01


class RewardsWrongAnswers(Sound):
    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        verdict = super().verify(params, response)
        return Verdict(reward=0.3 if verdict.correct is Correct.YES else 0.4, correct=verdict.correct)


class RewardsTooMuch(Sound):
    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        return Verdict.graded(super().verify(params, response).correct is Correct.YES, reward=7.0)


class SaysNotWhetherRight(Sound):
    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        return Verdict(reward=0.5)


class ReturnsNumbers(Sound):
    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        return 1.0  # type: ignore[return-value]


class VerifyRaises(Sound):
    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        int(response)
        return super().verify(params, response)


class ChangesParams(Sound):
    def verify(self, params: Any, response: str) -> Verdict:
        verdict = super().verify(params, response)
        params["seen"] = response
        return verdict


class Slow(Sound):
    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        ends_at = time.thread_time() + 0.06
        while time.thread_time() < ends_at:
            pass
        return super().verify(params, response)


class VerifyHangs(Sound):
    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        while True:
            time.sleep(1)


class MakeRaises(Sound):
    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        if level < 2:
            return super().make(level, random)
        raise ValueError("no such puzzle")


class MakeReturnsNothing(Sound):
    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        return None  # type: ignore[return-value]


class MakeHangs(Sound):
    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        while level:
            pass
        return super().make(level, random)


class MakeKills(Sound):
    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        os._exit(3)


class TooLong(Sound):
    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        question, params, answer = super().make(level, random)
        return question + "!" * 30_000 * level, params, answer


class Shrinks(Sound):
    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        question, params, answer = super().make(level, random)
        return question + " " * (100 if level == 0 else 0), params, answer


class RaisesNowAndThen(Sound):
    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        if random.random() < 0.3:
            raise ValueError("not this one")
        return super().make(level, random)


class Talks(Sound):
    """Answers back, for ever."""

    def start(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return dict(params)

    def step(self, state: Mapping[str, Any], response: str) -> EnvironmentStep:
        return EnvironmentStep(state=state, messages=({"role": "user", "content": "And?"},))

    def give_up(self, state: Mapping[str, Any]) -> Verdict:
        return Verdict.graded(False)


class TalksDifferently(Talks):
    count = 0

    def step(self, state: Mapping[str, Any], response: str) -> EnvironmentStep:
        TalksDifferently.count += 1
        told = f"{TalksDifferently.count}?"
        return EnvironmentStep(state=state, messages=({"role": "user", "content": told},))

    def give_up(self, state: Mapping[str, Any]) -> Verdict:
        return Verdict.graded(True)
