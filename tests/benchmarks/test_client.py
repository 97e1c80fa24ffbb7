from __future__ import annotations

import numpy as np
import pytest

from rollfeed.benchmarks.client import ClientWorkload, bench_client
from rollfeed.benchmarks.client_process import array_sizes
from rollfeed.testing import make_group
from rollfeed.types import Group, TrainBatch

WORKLOAD = ClientWorkload(repetitions=1, samples_per_step=16, min_tokens=100, n_samples_per_prompt=4)


def batch_of(group: Group) -> TrainBatch:
    advantages = np.zeros(len(group.samples), np.float32)
    return TrainBatch(step=0, policy_version=0, groups=(group,), advantages_S=advantages, metrics={})


def test_one_cell_has_its_figures_at_the_top() -> None:
    pytest.importorskip("httpx")
    told: list[str] = []
    result = bench_client(tokens=[40], in_flight=[5], workload=WORKLOAD, progress=told.append)
    assert result["cpu_seconds_per_million_tokens"] > 0
    assert result["reference_cpu_seconds_per_million_tokens"] > 0
    assert result["samples_per_second"] > 0
    assert result["reference_samples_per_second"] > 0
    assert result["peak_memory_mb"] > 0
    assert result["bytes_per_token"] == 4 * (3 * 40 + 150) / 40
    assert result["seed"] == 0
    assert len(told) == 1


def test_several_cells_are_compared_by_length() -> None:
    pytest.importorskip("httpx")
    result = bench_client(tokens=[20, 30], in_flight=[4, 18], workload=WORKLOAD, progress=lambda line: None)
    assert [(cell["tokens"], cell["in_flight"]) for cell in result["cells"]] == [(20, 4), (20, 18), (30, 4), (30, 18)]
    assert result["most_over_least_in_flight"].keys() == {"20", "30"}
    assert min(result["most_over_least_in_flight"].values()) >= 1


def test_a_view_counts_as_all_that_it_keeps_in_memory() -> None:
    group = make_group(rewards=[0.0, 1.0])
    before, num_tokens = array_sizes(batch_of(group))
    sample = group.samples[0]
    object.__setattr__(sample, "logprobs", np.zeros(1000, np.float32)[: sample.response_length])
    after, same_tokens = array_sizes(batch_of(group))
    assert same_tokens == num_tokens
    assert after == before - 4 * sample.response_length + 4000
