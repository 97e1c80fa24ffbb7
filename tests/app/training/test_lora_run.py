"""A run that trains an adapter: what it publishes, leaves and refuses; stopped in the middle, it goes on."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from rollfeed import app
from rollfeed.app.build import prepare
from rollfeed.app.training.checks import check_trained_model
from rollfeed.app.training.trained_checkpoints import trained_checkpoints
from rollfeed.config import RunSpec, Settings
from rollfeed.errors import ConfigError, RunDirectoryError
from rollfeed.store.json_text import read_records
from rollfeed.store.layout import TRAIN_LOG

REWARD = """
def score(sample, prompt):
    return float(sample.response_token_ids.sum() % 7)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "lora_run_reward.py").write_text(REWARD)
    yield tmp_path
    sys.modules.pop("lora_run_reward", None)


def spec_for(folder: Path, checkpoint: Path, *, num_rollout: int = 4, **lora: Any) -> RunSpec:
    tree: dict[str, Any] = {
        "seed": 3,
        "model": {"checkpoint": str(checkpoint)},
        "prompts": {"environments": [{"id": "core/copy_text", "apply_chat_template": False}]},
        "rollout": {
            "num_rollout": num_rollout,
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 2,
            "deterministic": True,
        },
        "sampling": {"rollout_max_response_len": 12},
        "engine": {"context_length": 256, "kernels": "torch", "precision": "fp32"},
        "train": {
            "checkpoint_interval": 2,
            "threads": 1,
            "optimizer": {"learning_rate": 0.01},
            "loss": {"kl_coefficient": 0.1},
            "lora": {"rank": 4, "target_modules": ["q_proj", "up_proj"], **lora},
        },
        "reward": {"override_environments": True, "functions_in_workers": False},
        "plugins": {"reward": "lora_run_reward:score"},
    }
    return RunSpec(Settings.model_validate(tree), (folder,))


def train(spec: RunSpec, out: Path) -> None:
    asyncio.run(app.train(prepare(spec), out=out))


def test_a_run_proves_publishes_and_leaves_its_adapter_also_when_it_goes_on(
    folder: Path, tiny_checkpoint: Path
) -> None:
    train(spec_for(folder, tiny_checkpoint), folder / "whole")
    train(spec_for(folder, tiny_checkpoint, num_rollout=2), folder / "two")
    train(spec_for(folder, tiny_checkpoint), folder / "two")
    whole, gone_on = (
        load_file(folder / name / "model" / "adapter" / "adapter_model.safetensors") for name in ("whole", "two")
    )
    assert whole.keys() == gone_on.keys()
    assert all((whole[name] == each).all() for name, each in gone_on.items())
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in whole} == {"q_proj", "up_proj"}
    merged, base = (
        load_file(folder / "whole" / "model" / "model.safetensors"),
        load_file(tiny_checkpoint / "model.safetensors"),
    )
    changed = {name for name, each in merged.items() if (each != base[name]).any()}
    assert {name.rpartition(".weight")[0].rpartition(".")[2] for name in changed} == {"q_proj", "up_proj"}
    assert not (
        folder / "whole" / "model" / "adapter_config.json"
    ).exists()  # transformers would add it to the merged ones
    # The engine has had what the trainer has: both say the same of the tokens of every step, and the proof ran.
    records = read_records(folder / "whole" / TRAIN_LOG)
    assert len(records) == 4
    assert all(record["train/mismatch_kl"] < 1e-6 for record in records)
    assert json.loads((folder / "whole" / "model" / "adapter" / "adapter_config.json").read_text())["r"] == 4


def test_a_run_of_another_rank_is_not_gone_on_with(folder: Path, tiny_checkpoint: Path) -> None:
    train(spec_for(folder, tiny_checkpoint, num_rollout=2), folder / "run")
    with pytest.raises(RunDirectoryError, match=r"train\.lora\.rank"):
        train(spec_for(folder, tiny_checkpoint, rank=8), folder / "run")


def test_modules_that_are_not_there_are_refused_before_a_run(folder: Path, tiny_checkpoint: Path) -> None:
    spec = spec_for(folder, tiny_checkpoint, target_modules=["qkv"])
    with pytest.raises(ConfigError, match="'qkv': the model has no such module; linear layers are: down_proj"):
        check_trained_model(spec.settings, tiny_checkpoint)


@pytest.mark.parametrize("checkpoint", ["tiny", "tiny-moe"])
def test_a_warm_up_of_an_adapter_of_random_weights_is_refused(
    checkpoint: str, folder: Path, tiny_checkpoint: Path
) -> None:
    tree = spec_for(folder, tiny_checkpoint).settings.model_dump(mode="json", exclude_unset=True)
    tree["model"]["checkpoint"] = checkpoint
    check_trained_model(Settings.model_validate(tree), tiny_checkpoint)
    tree["train"]["warm_up"] = {"stop_accuracy": 0.5}
    with pytest.raises(ConfigError, match=r"random and stay so.*name the folder model/"):
        check_trained_model(Settings.model_validate(tree), tiny_checkpoint)


def test_what_is_proven_of_fp8_is_proven_without_an_adapter(folder: Path, tiny_checkpoint: Path) -> None:
    served = folder / "served"
    served.mkdir()
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    (served / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    tree = spec_for(folder, tiny_checkpoint).settings.model_dump(mode="json", exclude_unset=True)
    tree["engine"] = {"context_length": 256, "sglang": {"workers": ["http://127.0.0.1:9"], "concurrency": 1}}
    tree["model"]["checkpoint"], tree["train"]["checkpoint"] = str(served), str(tiny_checkpoint)
    with pytest.raises(ConfigError, match=r"train\.lora: .* FP8 .* set weights\.proof\.num_texts = 0"):
        trained_checkpoints(Settings.model_validate(tree), served)


@pytest.mark.parametrize(
    ("table", "servers", "refused"),
    [
        ("openai", {"base_url": ["http://127.0.0.1:9"], "model": "m"}, True),
        ("sglang", {"workers": ["http://127.0.0.1:9"]}, False),
    ],
)
def test_a_rank_that_servers_do_not_take_is_refused_before_a_run(
    table: str, servers: dict[str, Any], refused: bool, folder: Path, tiny_checkpoint: Path
) -> None:
    tree = spec_for(folder, tiny_checkpoint).settings.model_dump(mode="json", exclude_unset=True)

    def check(rank: int, transport: str = "adapter") -> None:
        own = {**servers, "concurrency": 1, "weights_transport": transport}
        tree["engine"], tree["train"]["lora"]["rank"] = {"context_length": 256, table: own}, rank
        check_trained_model(Settings.model_validate(tree), tiny_checkpoint)

    check(512)
    check(513, "disk")
    said = r"rank = 513: vLLM takes adapters of a rank up to 512: lower it, or set engine\.openai\.weights_transport"
    with pytest.raises(ConfigError, match=said) if refused else nullcontext():
        check(513)


def test_an_adapter_is_refused_on_another_node_and_without_peft(
    folder: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = spec_for(folder, tiny_checkpoint).settings.model_dump(mode="json", exclude_unset=True)
    tree["cluster"] = {"kind": "ray", "trainer": "actor"}
    with pytest.raises(ConfigError, match=r"adapters are trained in this process: set cluster\.trainer = 'driver'"):
        check_trained_model(Settings.model_validate(tree), tiny_checkpoint)
    tree["cluster"]["trainer"] = "driver"
    check_trained_model(Settings.model_validate(tree), tiny_checkpoint)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollfeed\[lora\]'"):
        check_trained_model(Settings.model_validate(tree), tiny_checkpoint)


def test_adapters_are_published_where_there_are_some(folder: Path, tiny_checkpoint: Path) -> None:
    tree = spec_for(folder, tiny_checkpoint).settings.model_dump(mode="json", exclude_unset=True)
    servers = {"workers": ["http://127.0.0.1:9"], "concurrency": 1, "weights_transport": "adapter"}
    tree["engine"] = {"context_length": 256, "sglang": servers}
    check_trained_model(Settings.model_validate(tree), tiny_checkpoint)
    del tree["train"]["lora"]
    with pytest.raises(ConfigError, match=r'"adapter" is for what \[train\.lora\] trains: add it, or set "disk"'):
        check_trained_model(Settings.model_validate(tree), tiny_checkpoint)
