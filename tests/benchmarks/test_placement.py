from rollfeed.benchmarks.schedule import PLACEMENTS, PlacementWorkload, bench_placement


def test_every_placement_makes_the_same_batches_and_is_compared_with_none() -> None:
    told: list[str] = []
    workload = PlacementWorkload(
        num_prompts=8,
        learning_epochs=1,
        measured_epochs=2,
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        num_engines=1,
        num_slots=4,
        median_length=4.0,
        max_length=20,
    )
    result = bench_placement(workload, progress=told.append)
    assert len(told) == len(PLACEMENTS)
    assert result["speedup"]["none"] == 1.0
    for name in PLACEMENTS:
        assert len(result[name]["step_seconds"]) == 4
        assert 0.0 < result[name]["efficiency"] <= 1.1
