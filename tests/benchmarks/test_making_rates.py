from __future__ import annotations

from rollfeed.benchmarks.environments.making_rates import MakingWorkload, bench_environments


def test_rates_are_by_environment_and_a_generator_that_hangs_is_left(leaves_no_process: None) -> None:
    lines: list[str] = []
    workload = MakingWorkload(
        namespaces=("core/co", "none"), levels=(1,), seconds=0.05, draws=100, deadline_seconds=0.1
    )
    result = bench_environments(workload, progress=lines.append)
    core, draws = result["core/co"], result["draws_while_a_generator_hangs"]
    assert "none: none is installed" in lines
    # A busy machine may be too slow for a deadline as short as that.
    assert all("no result within" in row["first_failure"] for row in core["failed"])
    assert core["lowest"] == min(core["by_environment"].values())
    assert core["tasks_per_message"] > 1
    assert draws["killed"] > 0
    assert draws["p50_ms"] <= draws["p99_ms"] <= draws["longest_ms"]
