import json
from pathlib import Path

import pytest

from rollfeed.app import load_model
from rollfeed.benchmarks.train import TrainWorkload, bench_train, linear_layers, product_operations
from rollfeed.cli.main import main

PARTS = ("generation_seconds", "scoring_seconds", "training_seconds", "publishing_seconds")


def test_the_command_says_where_the_time_of_each_step_went(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(tiny_checkpoint), "--steps", "2", "--threads", "1", "--json"]
    assert main(["bench", "train", *options]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["workload"]["threads"] == 1
    assert result["machine"]["cores"] >= 1
    assert result["command"].split()[0] == "rollfeed"
    assert result["step_seconds"] > 0
    assert result["seconds_per_1000_output_tokens"] > 0
    assert result["output_tokens_per_second"] > 0
    assert len(result["steps"]) == 2
    for step in result["steps"]:
        assert sum(step[part] for part in PARTS) == pytest.approx(step["step_seconds"])
        assert step["output_tokens"] == 32 * step["mean_response_length"]
        inside = step["forward_seconds"] + step["backward_seconds"] + step["optimizer_seconds"]
        assert inside < step["training_seconds"]
    assert "warm-up: " in printed.err
    assert "step 1: " in printed.err


def test_the_bound_is_measured_for_the_tokens_that_were_computed(tiny_checkpoint: Path) -> None:
    workload = TrainWorkload(
        num_steps=4, num_warmup_steps=0, rollout_batch_size=2, n_samples_per_prompt=4, max_new_tokens=48, threads=1
    )
    result = bench_train(load_model(str(tiny_checkpoint)), workload=workload, progress=lambda _: None)
    for step in result["steps"]:
        assert step["trained_tokens"] <= step["output_tokens"]
        assert step["trained_tokens"] <= step["computed_tokens"] <= step["padded_tokens"]
        assert (step["share_of_bound"] is None) == (step["computed_tokens"] == 0)
        assert (step["bound_seconds"] > 0) == (step["bound_operations"] > 0) == (step["computed_tokens"] > 0)


def test_every_matrix_of_a_model_is_counted_three_times(tiny_checkpoint: Path) -> None:
    layers = linear_layers(tiny_checkpoint)
    width, inner, keys, vocabulary = 32, 64, 16, 259
    assert layers.head == (vocabulary, width)
    assert layers.inner == {(width, width): 4, (keys, width): 4, (inner, width): 4, (width, inner): 2}
    one_layer = 2 * width * width + 2 * keys * width + 3 * inner * width
    operations = product_operations(layers, num_tokens=10, num_logits=7)
    assert operations == 3 * 2 * (10 * 2 * one_layer + 7 * vocabulary * width)


@pytest.mark.parametrize(
    "options", [["--steps", "0"], ["--threads", "0"], ["--seed", "-1"], ["--model", "no-such-folder"]]
)
def test_bad_usage_is_refused_before_anything_runs(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", *options]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("rollfeed: ")
    assert printed.out == ""
