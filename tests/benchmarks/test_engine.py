from pathlib import Path

import pytest

from rollfeed.app import load_model
from rollfeed.benchmarks.engine import Workload, bench_engine


def test_the_engine_bench_compares_equal_work(tiny_checkpoint: Path) -> None:
    told: list[str] = []
    workload = Workload(num_groups=2, n_samples_per_prompt=2, new_tokens=4, repetitions=1)
    result = bench_engine(load_model(str(tiny_checkpoint)), threads=[1], workload=workload, progress=told.append)
    assert result["threads"] == 1
    assert result["ratio"] > 0
    assert result["ratio_int8"] > 0
    assert result["greedy_outputs_identical"]
    assert result["max_logprob_difference"] < 1e-4
    assert result["step_milliseconds"]["attention"] > 0
    whole = result["step_milliseconds"]["whole"]
    assert sum(result["step_milliseconds"].values()) == pytest.approx(2 * whole, rel=0.01)
    assert result["traffic_floor_milliseconds"] > 0
    assert len(told) == 3
