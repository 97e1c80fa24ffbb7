"""The time between two batches: every moment for one activity."""

import asyncio
import time

import pytest

from rollfeed.pipeline.groups.step_clock import Activity, StepClock
from rollfeed.protocols import Scorer
from rollfeed.testing import ScriptedEngine
from rollfeed.types import Verdict

ACTIVITIES = [f"time/{each.name.lower()}_seconds" for each in Activity]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def go(self, seconds: float) -> None:
        self.now += seconds


def test_of_several_activities_at_once_the_first_counts() -> None:
    now = Clock()
    clock = StepClock(now)
    now.go(1)
    with clock.doing(Activity.SCORE):
        now.go(2)
        with clock.doing(Activity.GENERATE):
            now.go(4)
            with clock.doing(Activity.GENERATE):
                now.go(8)
            now.go(16)
        with clock.doing(Activity.WAIT):
            now.go(32)
    clock.begin(Activity.TRAIN)
    now.go(64)
    with clock.doing(Activity.PUBLISH):
        clock.begin(Activity.GENERATE)
        now.go(128)
    clock.end(Activity.TRAIN)
    now.go(256)
    found = clock.take()
    assert {name: found[name] for name in ACTIVITIES} == {
        "time/publish_seconds": 128,
        "time/evaluate_seconds": 0,
        "time/store_seconds": 0,
        "time/train_seconds": 64,
        "time/generate_seconds": 4 + 8 + 16 + 256,
        "time/score_seconds": 2 + 32,
        "time/wait_seconds": 1,
    }
    assert found["time/total_seconds"] == found["time/run_seconds"] == 511
    now.go(3)
    assert clock.take()["time/total_seconds"] == 3


async def test_the_parts_of_every_step_add_up_to_its_duration(make_rollouts) -> None:
    class Scoring(Scorer):
        async def score(self, rollouts, prompt) -> list[Verdict]:
            del prompt
            await asyncio.sleep(0.01)
            return [Verdict(reward=1.0) for _ in rollouts]

    class Publishing(ScriptedEngine):
        async def apply(self, update) -> None:
            await asyncio.sleep(0.01)
            await super().apply(update)

    steps = []
    engine = Publishing(answer=lambda request: "1")
    async with make_rollouts(engine, scorer=Scoring(), commit=lambda commit: time.sleep(0.01)) as rollouts:
        for version in (1, 2, 3):
            steps.append((await rollouts.generate_batch()).metrics)
            await asyncio.sleep(0.01)
            with rollouts.clock.doing(Activity.EVALUATE):
                await asyncio.sleep(0.01)
            await rollouts.update_weights({}, policy_version=version)
    for metrics in steps:
        assert sum(metrics[name] for name in ACTIVITIES) == pytest.approx(metrics["time/total_seconds"])
        assert metrics["time/generate_seconds"] > 0
        assert 0 <= metrics["time/latency_p50"] <= metrics["time/latency_p90"] <= metrics["time/latency_p99"]
    assert steps[-1]["time/run_seconds"] == pytest.approx(sum(each["time/total_seconds"] for each in steps))
    assert 0 < steps[0]["time/unix_seconds"] < steps[1]["time/unix_seconds"]
    for metrics in steps[1:]:
        assert all(metrics[f"time/{name}_seconds"] > 0 for name in ("publish", "evaluate", "store", "train", "score"))
