from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from rollfeed.benchmarks.chaos import Chaos, KillKind, bench_chaos
from rollfeed.benchmarks.chaos.bench import plan_kills
from rollfeed.benchmarks.chaos.job import make_job
from rollfeed.errors import ConfigError


def test_kills_of_all_kinds_come_at_rising_steps_and_depend_on_the_seed_only() -> None:
    chaos = Chaos(num_kills=30)
    kills = plan_kills(chaos, 150, Random(1))
    assert Counter(kill.kind for kill in kills) == Counter(
        {KillKind.COMMIT: 8, KillKind.ENGINE: 8, KillKind.WORKER: 7, KillKind.PROCESS: 7}
    )
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
    assert kills == plan_kills(chaos, 150, Random(1)) != plan_kills(chaos, 150, Random(2))


def test_agents_are_killed_in_the_middle_of_episodes_only() -> None:
    kills = plan_kills(Chaos(num_kills=30, agents=True), 150, Random(1))
    assert [kill.kind for kill in kills] == [KillKind.EPISODE] * 30


def test_the_prompts_that_are_kept_fill_the_steps_exactly(tmp_path: Path) -> None:
    job = make_job(tmp_path, num_kills=10, mode="sync", deterministic=True, seed=1, addresses=["http://127.0.0.1:1"])
    assert len(job.kept_ids) == job.num_steps * job.batch_size
    assert job.dropped_ids
    assert not job.dropped_ids & job.kept_ids


@pytest.mark.parametrize(
    ("chaos", "told"),
    [
        (Chaos(num_kills=0), "--kills must be at least 1"),
        (Chaos(num_kills=1, mode="slow"), "--mode slow"),
        (Chaos(num_kills=1, mode="async", deterministic=True), "--deterministic"),
        (Chaos(num_kills=1, agents=True, environments=True), "leave out --environments"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(chaos: Chaos, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        bench_chaos(chaos, progress=lambda line: None)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="must be a new or an empty folder"):
        bench_chaos(Chaos(num_kills=1), keep=tmp_path, progress=lambda line: None)


@pytest.mark.soak
def test_a_run_whose_commit_is_broken_and_whose_engine_dies_comes_to_the_same_end(leaves_no_process: None) -> None:
    told: list[str] = []
    result = bench_chaos(Chaos(num_kills=2, deterministic=True), progress=told.append)
    assert result["passed"], result
    assert (result["lost"], result["duplicated"], result["reordered"]) == (0, 0, 0)
    assert result["kills"] == {"process": 0, "commit": 1, "engine": 1, "worker": 0, "episode": 0}
    assert len(told) == 2


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["sync", "partial", "async"])
def test_agents_that_are_killed_in_mid_episode_do_nothing_twice(leaves_no_process: None, mode: str) -> None:
    result = bench_chaos(Chaos(num_kills=3, mode=mode, agents=True), progress=lambda line: None)
    assert result["passed"], result
    assert (result["lost"], result["duplicated"], result["effects"]["repeated"]) == (0, 0, 0)
    assert result["kills"]["episode"] == len(result["open_episodes_at_kills"]) == 3
    assert any(result["open_episodes_at_kills"])


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["partial", "async"])
def test_a_run_that_is_killed_learns_of_levels_what_lies_in_its_files(leaves_no_process: None, mode: str) -> None:
    chaos = Chaos(num_kills=2, mode=mode, deterministic=mode == "partial", environments=True)
    result = bench_chaos(chaos, progress=lambda line: None)
    assert result["passed"], result
    assert result["levels_equal"] or mode == "async"
    assert max(result["levels"].values()) >= 2
