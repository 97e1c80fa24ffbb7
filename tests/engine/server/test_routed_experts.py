"""Experts on SGLang's wire: our server answers as SGLang does, and our client reads it, up to a training's end."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfeed import app
from rollfeed.config import RunSpec, Settings, TinyModelSettings
from rollfeed.engine.tiny import tiny_checkpoint
from rollfeed.store import RunReader
from rollfeed.store.layout import TRAIN_LOG


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        TinyModelSettings(hidden_size=32, num_layers=2),
        seed=1,
        cache_directory=tmp_path_factory.mktemp("moe"),
        has_experts=True,
    )


async def test_experts_are_returned_in_int32_where_they_are_asked_for(serving: Any, moe: Path) -> None:
    async with serving(checkpoint=moe) as client:
        asked = {"return_routed_experts": True}
        reply = await client.generate([3, 4, 5, 6], max_new_tokens=5, ignore_eos=True, top=asked)
        without = await client.generate([3, 4, 5, 6], max_new_tokens=5)
    numbers = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), "<i4").reshape(8, 2, 2)
    assert 0 <= numbers.min() < numbers.max() < 8
    assert (numbers[..., 0] != numbers[..., 1]).all()
    assert "routed_experts" not in without["meta_info"]


REWARD = """
def score(sample, prompt):
    return float(sample.response_token_ids.sum() % 7)
"""


async def test_answers_in_parts_are_trained_with_the_experts_of_all_parts(
    serving: Any, moe: Path, tmp_path: Path
) -> None:
    """A training whose answers are cut off at the end of a step, and go on with the weights of the next one."""
    (tmp_path / "reward_of_experts.py").write_text(REWARD)
    async with serving(checkpoint=moe) as client:
        tree = {
            "seed": 3,
            "model": {"checkpoint": str(moe)},
            "prompts": {"environments": [{"id": "core/copy_text", "apply_chat_template": False}]},
            "rollout": {
                "mode": "partial", "num_rollout": 4, "rollout_batch_size": 2, "over_sampling_batch_size": 4,
                "n_samples_per_prompt": 2,
            },
            "sampling": {"rollout_max_response_len": 120, "return_routed_experts": True},
            "engine": {"context_length": 256, "sglang": {"workers": [client.address]}},
            "train": {
                "device": "cpu", "threads": 1, "micro_batch_tokens": 512, "routing_replay": True,
                "loss": {"router_aux_loss_coefficient": 0.01},
            },
            "reward": {"override_environments": True, "functions_in_workers": False},
            "plugins": {"reward": "reward_of_experts:score"},
        }  # fmt: skip
        await app.train(app.prepare(RunSpec(Settings.model_validate(tree), (tmp_path,))), out=tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        samples = [sample for step in reader.steps() for sample in reader.batch(step.step).samples]
    assert any(len(sample.version_spans) > 1 for sample in samples)
    for sample in samples:
        assert sample.routed_experts is not None
        assert (sample.routed_experts.num_tokens, sample.routed_experts.per_token) == (len(sample.token_ids) - 1, 4)
    records = [json.loads(line) for line in (tmp_path / "run" / TRAIN_LOG).read_text().splitlines()]
    assert [each["train/updates"] for each in records] == [1.0] * 4
    assert records[0]["train/mismatch_kl"] < 1e-8
    assert all(each["train/router_aux_loss"] > 0 for each in records)
