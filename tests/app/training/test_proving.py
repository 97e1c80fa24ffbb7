"""Trainings whose engine keeps old weights end at once; those whose engine follows are proved in every precision."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollfeed.app import prepare, train
from rollfeed.config import RunSpec
from rollfeed.errors import EngineProtocolError
from rollfeed.training.probe import weight_types
from rollfeed.types import PUBLISHED, TensorUpdate

SETTINGS = """
seed = 1

[model]
checkpoint = "{checkpoint}"

[[prompts.environments]]
id = "core/copy_text"
level = 1

[rollout]
num_rollout = 4
rollout_batch_size = 4
n_samples_per_prompt = 2

[sampling]
rollout_max_response_len = 24

[engine]
context_length = 512
num_slots = 8
threads = 1

[reward]
override_environments = true

[plugins]
reward = "made_reward:score"

[train]
threads = 1

[train.optimizer]
learning_rate = 1e-3
"""
REWARD = "def score(sample, prompt):\n    return float(sample.response_token_ids.sum() % 7)\n"
Run = Callable[..., list[dict[str, float]]]


@pytest.fixture
def run(tiny_checkpoint: Path, tmp_path: Path) -> Run:
    """Train, with an engine that is changed first; return the metrics of each step."""

    def run(*overrides: str, change: Callable[[Any], None] = lambda engine: None, out: str = "run") -> Any:
        (tmp_path / "made_reward.py").write_text(REWARD)
        file = tmp_path / "train.toml"
        file.write_text(SETTINGS.format(checkpoint=tiny_checkpoint))
        prepared = prepare(RunSpec.load(file, overrides))
        change(prepared.engine)
        asyncio.run(train(prepared, out=tmp_path / out))
        return [json.loads(line) for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]

    return run


def keeping(kept: Callable[[str], bool], *, from_version: int = 0) -> Callable[[Any], None]:
    """Have weights dropped on the way to an engine, which says that it has them."""

    def change(engine: Any) -> None:
        apply = engine.apply

        async def apply_some(update: TensorUpdate) -> None:
            stale = update.policy_version >= from_version
            passed = {name: tensor for name, tensor in update.tensors.items() if not (stale and kept(name))}
            await apply(replace(update, tensors=passed))

        engine.apply = apply_some

    return change


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_an_engine_that_follows_is_proved_at_every_publish(run: Run, precision: str) -> None:
    steps = run(f"engine.precision={precision}")
    assert ["weights/proof_slope" in step for step in steps] == [False, True, True, True]
    assert steps[-1]["weights/proof_slope"] == pytest.approx(1.0, abs=0.01 if precision == "fp32" else 0.3)
    assert steps[-1]["perf/proof_seconds"] > 0.0


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_an_engine_that_takes_nothing_ends_the_training_with_its_name_and_figures(run: Run, precision: str) -> None:
    with pytest.raises(EngineProtocolError) as caught:
        run(f"engine.precision={precision}", change=keeping(lambda name: True))
    message = str(caught.value)
    assert message.startswith("the embedded engine: version 1 is not what it has: of the change since version 0 (")
    assert "it has made 0 +- " in message


@pytest.mark.parametrize(
    "kept", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_single_weight_that_stays_behind_is_enough_in_fp32(run: Run, kept: str) -> None:
    with pytest.raises(EngineProtocolError, match="version 1 is not what it has"):
        run(change=keeping(lambda name: name == kept))


def test_one_that_stays_behind_later_is_found_when_it_does(run: Run) -> None:
    with pytest.raises(EngineProtocolError, match="version 3 is not what it has: of the change since version"):
        run(change=keeping(lambda name: True, from_version=3))


def test_a_training_that_goes_on_measures_a_new_base(run: Run) -> None:
    with pytest.raises(EngineProtocolError):
        run(change=keeping(lambda name: True, from_version=3))
    steps = run()
    assert len(steps) == 4
    assert steps[-1]["step"] == 3


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("learning_rate", ["1e-5", "1e-3"])
def test_two_hundred_publishes_bring_no_false_alarm(run: Run, precision: str, learning_rate: str) -> None:
    steps = run(
        f"engine.precision={precision}",
        f"train.optimizer.learning_rate={learning_rate}",
        "rollout.num_rollout=201",
        "train.checkpoint_interval=1000",
    )
    assert sum("weights/proof_slope" in step for step in steps) == 200


def test_nothing_is_proved_where_that_is_switched_off(run: Run) -> None:
    steps = run("weights.proof.num_texts=0", change=keeping(lambda name: True))
    assert not any("proof" in name for step in steps for name in step)


@pytest.mark.parametrize(
    ("stored", "precision", "is_embedded", "expected"),
    [
        (torch.bfloat16, "fp32", True, (PUBLISHED,)),
        (torch.bfloat16, "int8", True, ("int8",)),
        (torch.float32, "bf16", True, ("bfloat16",)),
        (torch.bfloat16, "unknown", False, ("bfloat16",)),
        (torch.float16, "unknown", False, ("float16", "bfloat16")),
        (torch.float32, "auto", False, (PUBLISHED, "bfloat16", "float16")),
    ],
)
def test_servers_may_hold_weights_coarser_than_they_are_published(
    stored: torch.dtype, precision: str, is_embedded: bool, expected: tuple[str, ...], tmp_path: Path
) -> None:
    save_file({"a": torch.ones(2, 2, dtype=stored)}, tmp_path / "model.safetensors")
    assert weight_types(tmp_path, precision=precision, is_embedded=is_embedded) == expected
