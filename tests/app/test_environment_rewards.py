"""Graders ``environment`` and ``rlve`` with the processes of a run."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfeed.app import open_rollouts
from rollfeed.app.rewards import RewardServices, open_reward_hub
from rollfeed.config import RewardSettings, RolloutConfig
from rollfeed.rewards.hub import RewardHub
from rollfeed.testing import CharTokenizer, ListSource, ScriptedEngine
from rollfeed.types import Correct, Outcome, Prompt, Verdict

ENVIRONMENT = '''
import os
import time

from rollfeed.types import Correct, Verdict


class Moody:
    """Does what its problem says."""

    environment_id = "mine/moody"
    version = 2
    summary = "does what its problem says"
    max_level = 3

    def make(self, level, random):
        return "?", {"mood": "well", "level": level}, "4"

    def verify(self, params, response):
        if params["mood"] == "sleep" and response == params["sleeps_on"]:
            open(os.environ.get("TEST_SLEEPING", os.devnull), "w").close()
            time.sleep(3600)
        if params["mood"] == "die":
            os.abort()
        if params["mood"] == "raise":
            raise ZeroDivisionError("by zero")
        if params["mood"] == "nan":
            return Verdict(reward=float("nan"))
        if params["mood"] == "number":
            return 1.0
        right = response == "4"
        return Verdict(reward=float(right), correct=Correct.YES if right else Correct.NO, detail=str(os.getpid()))
'''


@pytest.fixture
def moody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that brings the environments ``mine/moody`` and ``mine/broken`` is installed."""
    record = tmp_path / "moody-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: moody\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(
        "[rollfeed.environments]\nmine/moody = moody_environment:Moody\nmine/broken = no_such_module:Broken\n"
    )
    (tmp_path / "moody_environment.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)


def hub(services: RewardServices, **settings: Any) -> RewardHub:
    defaults: dict[str, Any] = {"graders": services.graders(), "timeout_seconds": 30.0, "workers": services.workers}
    return RewardHub(**{**defaults, **settings})


def problem(mood: str = "well", **changes: Any) -> dict[str, Any]:
    return {"environment": "mine/moody", "version": 2, "params": {"mood": mood, "sleeps_on": "4"}, **changes}


async def test_own_environments_need_neither_worker_nor_thread(services: RewardServices) -> None:
    threads = set(threading.enumerate())
    for rm_type in ("environment", "rlve"):
        metadata = {"environment": "core/add_numbers", "params": {"terms": [2, 3]}}
        verdict = await hub(services, rm_type=rm_type).grade("It is 5.", None, metadata=metadata)
        assert (verdict.reward, verdict.correct) == (1.0, Correct.YES)
    assert services.workers.counts.calls == 0
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("rm_type", ["environment", "rlve"])
async def test_environment_of_another_package_verifies_in_a_worker(
    moody: None, services: RewardServices, rm_type: str
) -> None:
    scorer = hub(services, rm_type=rm_type)
    right, wrong = [await scorer.grade(response, None, metadata=problem()) for response in ("4", "5")]
    assert (right.reward, right.correct, wrong.reward, wrong.correct) == (1.0, Correct.YES, 0.0, Correct.NO)
    assert int(right.detail) > 0
    assert services.workers.counts.calls == 2
    assert "moody_environment" not in sys.modules


FAILURES = [
    (problem("raise"), "environment mine/moody: verify raised ZeroDivisionError: by zero"),
    (problem("number"), "it must return a Verdict"),
    (problem("nan"), "nan"),
    (problem("die"), "SIGABRT"),
    (problem(params={}), "verify raised KeyError: 'mood'"),
    (problem(params={"mood": object()}), "not JSON"),
    (problem(version=1), "the prompt is of version 1, installed is 2"),
    (problem(environment="mine/moddy"), "did you mean mine/moody"),
    (problem(environment="mine/broken"), "entry point 'no_such_module:Broken'"),
]


async def test_failure_of_an_environment_is_an_error_with_its_cause(moody: None, services: RewardServices) -> None:
    scorer = hub(services, rm_type="environment")
    for metadata, detail in FAILURES:
        verdict = await scorer.grade("4", None, metadata=metadata)
        assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)
        assert detail in verdict.detail


async def test_problem_of_another_package_is_made_again_in_the_worker(moody: None, services: RewardServices) -> None:
    metadata = {"environment": "mine/moody", "config": {"seed": 9}, "problem_difficulty": 3}
    assert (await hub(services, rm_type="rlve").grade("4", None, metadata=metadata)).correct is Correct.YES
    metadata["problem_difficulty"] = 4
    verdict = await hub(services, rm_type="rlve").grade("4", None, metadata=metadata)
    assert "its levels are 0 to 3" in verdict.detail


async def test_verifier_that_never_returns_is_killed_and_leaves_neither_process_nor_thread(
    moody: None, leaves_no_process: None, pass_seconds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, sleeping = set(threading.enumerate()), tmp_path / "sleeping"
    monkeypatch.setenv("TEST_SLEEPING", str(sleeping))
    settings = RewardSettings(rm_type="environment", workers={"num_workers": 1, "timeout_seconds": 300.0})
    async with open_reward_hub(settings) as scorer:
        grading = asyncio.create_task(scorer.grade("4", None, metadata=problem("sleep")))
        while not sleeping.exists():
            assert not grading.done()
            await asyncio.sleep(0.01)
        pass_seconds(300.0)
        verdict = await grading
        assert (verdict.outcome, verdict.reward) == (Outcome.TIMEOUT, None)
        assert "300 s" in verdict.detail
        assert (await scorer.grade("5", None, metadata=problem("sleep"))).reward == 0.0
    assert set(threading.enumerate()) <= threads


class MoodySource(ListSource):
    """Prompts of the environment, as its own source would make them."""

    async def draw(self, count: int) -> list[Prompt]:
        metadata = {"rm_type": "environment", **problem("sleep")}
        return [replace(prompt, metadata=metadata) for prompt in await super().draw(count)]


async def test_run_counts_the_verifier_that_never_returns_and_goes_on(moody: None, leaves_no_process: None) -> None:
    config = RolloutConfig(
        rollout={"rollout_batch_size": 2, "n_samples_per_prompt": 2},
        reward={"workers": {"num_workers": 2, "timeout_seconds": 4.0}},
        plugins={"sample_hook": lambda sample, prompt: replace(sample, response="4" if sample.index == 1 else "5")},
    )
    rollouts = open_rollouts(
        config, source=MoodySource(["a", "b", "c"], repeat=True), engine=ScriptedEngine(), tokenizer=CharTokenizer()
    )
    async with rollouts:
        batch = await rollouts.generate_batch()
    assert batch.metrics["rollout/reward_timeout"] == 1
    assert batch.metrics["rollout/groups_failed"] == 1
    assert [sample.reward for sample in batch.samples] == [0.0] * 4
    assert not np.isnan(batch.advantages_S).any()


# RLVE-Gym

# Made by RLVE-Gym 0.0.1 with seed 3, and written as JSON.
GYM_ROWS = [
    ("Multiplication", {"digit_num": 2, "a": 30, "b": 75, "reference_answer": 2250, "prompt_template": 8}, "2250"),
    (
        "BucketSorting",
        {"N": 4, "MAX": 3, "array": [1, 1, 2, 3], "value2count": {"1": 2, "2": 1, "3": 1}, "reference_answer": 1},
        "1",
    ),
    ("Cinema", {"MAX_N_K": 4, "N": 2, "K": 4, "gold_answer": [15, 16], "reference_answer": "15 16"}, "15 16"),
    ("LargestConvexPolygon", {"N": 4, "points": [[2, 4], [0, 3], [4, 1], [1, 4]], "gold_answer": 4}, "1 2 3 4"),
    (
        "QuadMagicItems",
        {"N": 5, "X": [2, 5, 5, 2, 3], "gold_answer": [[0, 0, 0, 0]] * 5, "reference_answer": "0 0 0 0\n" * 5},
        "\n".join(["0 0 0 0"] * 5),
    ),
]


@pytest.mark.skipif(importlib.util.find_spec("Gym") is None, reason="rlve-gym is not installed")
async def test_environments_of_rlve_gym_grade_as_they_do_before_json(services: RewardServices) -> None:
    scorer = hub(services, rm_type="rlve")
    for name, parameter, answer in GYM_ROWS:
        metadata = {"environment": name, "config": {"seed": 3, "parameter": parameter}}
        for response in (f"<think>0</think><answer>{answer}</answer>", rf"<answer>9</answer> \boxed{{{answer}}}"):
            verdict = await scorer.grade(response, None, metadata=metadata)
            assert verdict == Verdict(reward=1.0, correct=Correct.YES, extracted=answer)
        unmarked = await scorer.grade(answer, None, metadata=metadata)
        assert unmarked == Verdict(reward=-1.0, correct=Correct.NO, format_ok=False)
        chosen = await scorer.grade(answer, None, metadata=metadata, reward_key="accuracy")
        assert chosen.reward == {"reward": -1.0, "accuracy": 0.0, "format_score": 0.0}


GYM = """
import time

import torch


class Fickle:
    def __init__(self, answer_markers):
        self.markers = answer_markers

    def set_config(self, config):
        self.parameter, self.passing_reward_threshold = config["parameter"], config.get("threshold", 1.0)

    def scorer(self, output):
        if output == "":
            return -1.0
        if self.parameter["score"] == "sleep":
            time.sleep(3600)
        first, last = self.markers
        assert output.startswith(first) and output.endswith(last)
        return self.parameter["score"]


identifier2environment = {"Fickle": Fickle}
"""


@pytest.fixture
def fickle_gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that has the shape of RLVE-Gym is installed, without torch."""
    (tmp_path / "Gym" / "environments").mkdir(parents=True)
    (tmp_path / "Gym" / "__init__.py").touch()
    (tmp_path / "Gym" / "environments" / "__init__.py").write_text(GYM)
    monkeypatch.syspath_prepend(tmp_path)


def fickle(score: Any = 1.0, **config: Any) -> dict[str, Any]:
    return {"environment": "rlve/Fickle", "config": {"parameter": {"score": score}, **config}}


async def test_rewards_of_rlve_gym_are_passed_on(fickle_gym: None, services: RewardServices) -> None:
    scorer = hub(services, rm_type="rlve")
    partly = await scorer.grade(r"\boxed{\frac{1}{2}}", None, metadata=fickle(0.25))
    assert partly == Verdict(reward=0.25, correct=Correct.NO, extracted=r"\frac{1}{2}")
    passed = await scorer.grade(r"\boxed{2}", None, metadata=fickle(0.25, threshold=0.2))
    assert (passed.reward, passed.correct) == (0.25, Correct.YES)
    own_key = await scorer.grade(r"\boxed{2}", None, metadata={**fickle(0.25), "reward_key": "accuracy"})
    assert own_key.reward == 0.0
    no_key = await scorer.grade(r"\boxed{2}", None, metadata={**fickle(0.25), "reward_key": "score"})
    assert "reward_key = 'score' is not in the reward" in no_key.detail


GYM_FAILURES = [
    (fickle("high"), "environment Fickle: RLVE-Gym raised ValueError"),
    (fickle(2.0), "RLVE-Gym returned 2.0"),
    (fickle(float("nan")), "RLVE-Gym returned nan"),
    (fickle(None), "RLVE-Gym raised TypeError"),
    (fickle(1.0, threshold="1"), "RLVE-Gym raised TypeError"),
    ({**fickle(), "environment": "Fickel"}, "RLVE-Gym has none of that name; did you mean Fickle?"),
    ({**fickle(), "config": None}, "no config with the problem"),
    ({**fickle(), "config": {"seed": 3}}, "no config with the problem"),
]


async def test_failure_of_rlve_gym_is_an_error_with_its_cause(fickle_gym: None, services: RewardServices) -> None:
    scorer = hub(services, rm_type="rlve")
    for metadata, detail in GYM_FAILURES:
        verdict = await scorer.grade(r"\boxed{2}", None, metadata=metadata)
        assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)
        assert detail in verdict.detail


async def test_scorer_of_rlve_gym_that_never_returns_is_killed(fickle_gym: None, leaves_no_process: None) -> None:
    settings = RewardSettings(rm_type="rlve", workers={"num_workers": 1, "timeout_seconds": 1.0})
    async with open_reward_hub(settings) as scorer:
        verdict = await scorer.grade(r"\boxed{2}", None, metadata=fickle("sleep"))
    assert (verdict.outcome, verdict.reward) == (Outcome.TIMEOUT, None)


async def test_gym_that_is_not_rlve_gym_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, services: RewardServices
) -> None:
    (tmp_path / "Gym").mkdir()
    (tmp_path / "Gym" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    verdict = await hub(services, rm_type="rlve").grade(r"\boxed{2}", None, metadata=fickle())
    assert verdict.outcome is Outcome.ERROR
    assert "RLVE-Gym cannot be imported" in verdict.detail
    assert "pip install 'rollfeed[rlve]'" in verdict.detail
