from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.conversations.zoo.families import load

from rollfeed.benchmarks.agents import AgentsWorkload, TurnsWorkload, bench_agents, bench_turns, mean_wait_seconds
from rollfeed.benchmarks.schedule_workload import ScheduleMode
from rollfeed.cli.main import main

SMALL = AgentsWorkload(
    mode=ScheduleMode.ASYNC,
    num_steps=6,
    num_engines=2,
    num_slots=4,
    rollout_batch_size=4,
    n_samples_per_prompt=2,
    median_length=6.0,
    max_length=40,
    mean_turns=2,
    told_tokens=3,
    median_wait_seconds=0.02,
)


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3"])
def test_conversations_of_any_number_of_turns_end_at_the_same_number_of_tokens(name: str) -> None:
    told: list[str] = []
    workload = TurnsWorkload(context_tokens=1024, num_turns=(2, 8), repetitions=1)
    result = bench_turns(workload, load(name), progress=told.append)
    assert len(told) == 2
    for row in result["turns"]:
        assert row["context_tokens"] == pytest.approx(1024, rel=0.1)
        assert row["turn_ms"] * row["num_turns"] == pytest.approx(row["episode_ms"])
        assert min(row["turn_ms"], row["reference_turn_ms"], row["last_quarter_over_first"]) > 0.0
    json.dumps(result)


def test_the_command_measures_turns_alone_where_no_steps_are_asked_for(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(tiny_checkpoint), "--steps", "0", "--repetitions", "1", "--context", "1024"]
    assert main(["bench", "agents", *options]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_engines_work_while_rollouts_wait_for_their_tools() -> None:
    workload = TurnsWorkload(context_tokens=512, num_turns=(2, 4), repetitions=1)
    result = bench_agents(workload, SMALL, load("chatml"), progress=lambda line: None)
    schedule = result["schedule"]
    assert 0.0 < schedule["efficiency"] < 1.1
    assert schedule["wasted_fraction"] < 0.2
    assert result["mean_wait_seconds"] > SMALL.median_wait_seconds
    json.dumps(result)


def test_more_groups_are_in_flight_the_longer_tools_take() -> None:
    quick, slow = (AgentsWorkload(mode=ScheduleMode.ASYNC, median_wait_seconds=each) for each in (0.0, 0.8))
    assert slow.groups_in_flight > 1.2 * quick.groups_in_flight
    random = np.random.default_rng(1)
    expected = 0.8 * np.minimum(np.exp(1.25 * random.normal(size=1 << 16)), 30.0).mean()
    assert mean_wait_seconds(slow) == pytest.approx(expected, rel=0.05)
