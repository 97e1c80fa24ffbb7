"""`rollfeed train` with an adapter that is killed goes on bit by bit, after a warm-up and on demonstrations."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

SETTINGS = """
seed = 3

[model]
checkpoint = "{checkpoint}"

[model.tiny]
characters = "abcdrev:="
hidden_size = 32
num_layers = 2
num_heads = 2

[engine]
context_length = 32
num_slots = 32
threads = 1

[train]
threads = 1
checkpoint_interval = 2

[train.optimizer]
learning_rate = 1e-2

[plugins]
sample_hook = "killing_hook:keep"
"""
LORA = """
[train.lora]
rank = 4
target_modules = ["q_proj", "v_proj", "down_proj"]
"""
REWARDED = """
[[prompts.environments]]
id = "core/reverse_text"
level = 0
apply_chat_template = false
parameters = {{ style = "compact", alphabet_size = 4 }}

[rollout]
num_rollout = 4
rollout_batch_size = 4
n_samples_per_prompt = 6
deterministic = true

[sampling]
rollout_max_response_len = 4
rollout_skip_special_tokens = true

[train.loss]
kl_coefficient = 0.1

[train.warm_up]
stop_accuracy = {stop_accuracy}
batch_size = 32
learning_rate = 1e-2
probe_interval = 10
probe_prompts = 100
"""
DEMONSTRATED = """
[[prompts.datasets]]
path = "words.jsonl"
label_key = "label"
apply_chat_template = false

[rollout]
mode = "sft"
num_rollout = 4
rollout_batch_size = 8
"""
HOOK = """
import os, signal
from pathlib import Path

def keep(sample, prompt):
    when = Path(__file__).with_name("kill_when")
    if when.exists() and Path(when.read_text()).is_dir():
        os.kill(os.getpid(), signal.SIGKILL)
    return sample
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "killing_hook.py").write_text(HOOK)
    words = ["".join("abcd"[number // 4**place % 4] for place in range(3)) for number in range(64)]
    rows = [{"prompt": f"rev:{word}=", "label": word[::-1]} for word in words]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def left_by(out: Path) -> dict[str, Any]:
    """All that a training has written of itself but times."""
    lines = {
        path.name: [{**json.loads(line), "seconds": 0} for line in path.read_text().splitlines()]
        for path in (out / "train.jsonl", out / "warm-up.jsonl")
        if path.exists()
    }
    weights = [out / "model" / "model.safetensors", out / "model" / "adapter" / "adapter_model.safetensors"]
    return {**lines, **{path.name: path.read_bytes() for path in weights}}


def write_settings(folder: Path, kind: str, start: Callable[..., Any]) -> None:
    """Write `train.toml`; an adapter that is rewarded is one of a model that knows something."""
    if kind == "demonstrated":
        (folder / "train.toml").write_text(SETTINGS.format(checkpoint="tiny") + LORA + DEMONSTRATED)
        return
    first = SETTINGS.format(checkpoint="tiny") + REWARDED.format(stop_accuracy=0.2)
    (folder / "first.toml").write_text(first.replace("num_rollout = 4", "num_rollout = 1"))
    assert start("train", folder / "first.toml", "--out", folder / "first").wait() == 0
    begun = SETTINGS.format(checkpoint=folder / "first" / "model")
    (folder / "train.toml").write_text(begun + LORA + REWARDED.format(stop_accuracy=0.4))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "moments"), [("rewarded", ("warm-up", "step-000001")), ("demonstrated", ("step-000001",))]
)
def test_a_training_of_an_adapter_that_is_killed_goes_on_bit_by_bit(
    kind: str, moments: tuple[str, ...], folder: Path, start_rollfeed: Callable[..., Any]
) -> None:
    write_settings(folder, kind, start_rollfeed)
    whole = start_rollfeed("train", folder / "train.toml", "--out", folder / "whole")
    said = whole.read()
    assert whole.wait() == 0, said
    out = folder / "killed"
    for moment in moments:
        (folder / "kill_when").write_text(str(out / "checkpoints" / moment))
        assert start_rollfeed("train", folder / "train.toml", "--out", out).wait() == -signal.SIGKILL
        assert (out / "checkpoints" / moment).is_dir()
        assert not (out / "model").exists()
    (folder / "kill_when").unlink()
    assert start_rollfeed("train", folder / "train.toml", "--out", out).wait() == 0
    assert left_by(out) == left_by(folder / "whole")
    trained = load_file(out / "model" / "adapter" / "adapter_model.safetensors")
    assert all(each.any() for name, each in trained.items() if ".lora_B." in name)
    steps = left_by(out)["train.jsonl"]
    assert len(steps) == 4
    if kind == "rewarded":
        divergences = [step["train/reference_kl"] for step in steps]
        assert divergences[0] == pytest.approx(0.0, abs=1e-6)  # from the adapter that the warm-up has left
        assert divergences[-1] > 1e-4
    else:
        assert steps[-1]["train/loss"] < steps[0]["train/loss"]
