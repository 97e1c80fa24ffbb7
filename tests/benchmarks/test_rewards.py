from __future__ import annotations

from dataclasses import replace

from rollfeed.benchmarks.rewards import JudgeWorkload, RewardWorkload, bench_judge, bench_rewards, make_pairs


def test_inputs_depend_on_the_seed_only() -> None:
    assert make_pairs(RewardWorkload(num_inputs=50)) == make_pairs(RewardWorkload(num_inputs=50))
    assert make_pairs(RewardWorkload(num_inputs=50)) != make_pairs(RewardWorkload(num_inputs=50, seed=1))


def test_hub_and_reference_give_the_same_verdicts_and_hanging_inputs_time_out(leaves_no_process: None) -> None:
    lines: list[str] = []
    patient = RewardWorkload(num_inputs=40, hanging_shares=(0.0,), deadline_seconds=60.0, repetitions=1)
    result = bench_rewards(patient, progress=lines.append)
    assert result["hub_right"] == result["math_verify_right"] > 0
    (clean,) = result["by_hanging_share"]
    assert (clean["num_timeouts"], clean["lost_seconds"]) == (0, 0.0)
    impatient = replace(patient, hanging_shares=(0.05,), deadline_seconds=0.5)
    (hanging,) = bench_rewards(impatient, progress=lines.append)["by_hanging_share"]
    assert hanging["num_hanging"] == 2 <= hanging["num_timeouts"]  # on a busy machine others may be too late, too
    assert len(lines) == 4


def test_the_calls_of_a_judge_are_timed_beside_the_same_requests() -> None:
    lines: list[str] = []
    result = bench_judge(JudgeWorkload(num_calls=16, call_seconds=0.01, repetitions=1), progress=lines.append)
    assert 1 <= result["most_calls_at_once"] <= 16
    assert result["passed"] is (result["most_calls_at_once"] == 16)
    assert min(result["seconds"], result["reference_seconds"]) >= 0.01
    assert len(lines) == 1
