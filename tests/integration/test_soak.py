"""What takes minutes: `make soak`."""

import asyncio
import os
import random
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rollfeed import app
from rollfeed.benchmarks.chaos import Chaos, bench_chaos
from rollfeed.config import RolloutConfig
from rollfeed.store import RunDirectory
from rollfeed.testing import CharTokenizer, Fault, ListSource, ScriptedEngine
from rollfeed.types import StepCommit

pytestmark = pytest.mark.soak


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_five_hundred_steps_leave_memory_tasks_and_descriptors_where_they_were(tmp_path: Path) -> None:
    config = RolloutConfig(
        rollout={
            "rollout_batch_size": 8,
            "n_samples_per_prompt": 4,
            "over_sampling_factor": 2.0,
            "refill_granularity": 1,
            "failure_budget": 1.0,
        },
        plugins={"reward": lambda sample, prompt: float(sample.response)},
    )
    engine = ScriptedEngine(
        random_order=1, fault_of=lambda request: Fault.RAISE if request.params.seed % 50 == 0 else None
    )
    source = ListSource([f"prompt {number} " * 20 for number in range(100)], repeat=True)
    with RunDirectory.open(tmp_path / "run", settings={}, identity={}, overwrite=False) as directory:

        def commit(step: StepCommit) -> None:
            directory.commit(step, reward_key=None)

        rollouts = app.open_rollouts(config, source=source, engine=engine, tokenizer=CharTokenizer(), commit=commit)
        async with rollouts:
            for step in range(500):
                await rollouts.generate_batch()
                engine.requests.clear()
                assert rollouts.ledger.balanced
                if step == 100:
                    memory, descriptors, tasks = resident_bytes(), num_descriptors(), len(asyncio.all_tasks())
                    journal = sum(path.stat().st_size for path in (tmp_path / "run").glob("journal*"))
            assert resident_bytes() < 1.05 * memory
            assert num_descriptors() <= descriptors
            assert len(asyncio.all_tasks()) <= tasks
            assert sum(path.stat().st_size for path in (tmp_path / "run").glob("journal*")) < 3 * journal


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["sync", "partial"])
def test_thirty_kills_of_all_kinds_change_no_batch(mode: str) -> None:
    result = bench_chaos(Chaos(num_kills=30, mode=mode, deterministic=True), progress=print)
    assert result["passed"], result
    assert (result["lost"], result["duplicated"], result["reordered"]) == (0, 0, 0)
    assert result["commits_hit"] > 0


def test_thirty_kills_lose_and_double_nothing(start_rollfeed, rollfeed, settings_file, tmp_path: Path) -> None:
    out, unbroken = tmp_path / "run", tmp_path / "unbroken"
    settings = settings_file(num_rollout=400)
    option = ("--set", "rollout.deterministic=true")
    instants = random.Random(3)
    for _ in range(30):
        process = start_rollfeed("run", settings, "--out", out, *option)
        time.sleep(0.5 + instants.random())  # the instant is what is tested
        assert process.poll() is None
        process.kill()
        process.wait()
    assert rollfeed("run", settings, "--out", out, *option).code == 0
    assert rollfeed("run", settings, "--out", unbroken, *option).code == 0
    paths = sorted((unbroken / "batches").glob("*.parquet"))
    assert len(paths) == 400
    trained = [name for path in paths for name in pq.read_table(path).column("prompt_id").to_pylist()]
    assert len(set(trained)) == 400 * 3
    for path in paths:
        assert (out / "batches" / path.name).read_bytes() == path.read_bytes()
