"""The bench holds its conversations, and finds that they are sampled, trained and counted as they must."""

from rollfeed import app
from rollfeed.benchmarks.gateway.gateway_bench import GatewayWorkload, bench_gateway
from rollfeed.cli import bench_lines


def test_every_turn_of_the_bench_is_trained_as_it_was_sampled() -> None:
    workload = GatewayWorkload(context_tokens=2048, num_turns=3, num_sessions=2, repetitions=1)
    result = bench_gateway(workload, app.load_model(with_weights=False), progress=lambda line: None)
    assert result["passed"]
    samples = result["samples"]
    # Three APIs, once to warm up and once measured.
    assert (samples["num_samples"], samples["num_trained"]) == (12, 36)
    assert set(result["cpu_milliseconds_per_turn_by_api"]) == {"chat/completions", "responses", "messages"}
    measured, found = bench_lines.gateway(result)
    assert "a server that echoes takes" in measured
    assert "36 turns in 12 samples: 0 not as sampled" in found
