"""What a training does without: matplotlib, with a warning; PyTorch or memory, with one line."""

import sys
from pathlib import Path

import pytest
import torch

TRAIN = """
[train]
micro_batch_tokens = 512

[reward]
override_environments = true

[plugins]
reward = "some_reward:score"
"""
REWARD = """
def score(sample, prompt):
    return float(sample.response_token_ids.sum() % 7)
"""


@pytest.fixture(autouse=True)
def reward_beside_the_settings(tmp_path: Path) -> None:
    (tmp_path / "some_reward.py").write_text(REWARD)


@pytest.mark.parametrize("command", ["check", "train"])
def test_without_matplotlib_the_picture_is_left_out_with_a_warning(
    rollfeed, settings_file, tmp_path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.delitem(sys.modules, "rollfeed.report.picture", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "run"
    result = rollfeed(command, settings_file(TRAIN, num_rollout=1), "--out", out)
    assert result.code == 0, result.err
    (warning,) = (line for line in result.err.splitlines() if "matplotlib" in line)
    assert warning.startswith("curve.png is left out, as matplotlib cannot be used")
    if command == "train":
        assert (out / "curve.html").exists()
        assert not (out / "curve.png").exists()
        assert "1 batch in " in result.out


@pytest.mark.parametrize("command", ["check", "train"])
def test_without_torch_a_training_on_servers_is_refused(
    rollfeed, settings_file, tmp_path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    settings = settings_file(TRAIN + '[engine.sglang]\nworkers = ["http://127.0.0.1:9"]\n')
    monkeypatch.setitem(sys.modules, "torch", None)
    result = rollfeed(command, settings, "--out", tmp_path / "run")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "training needs torch, which is not installed: pip install 'rollfeed[train]'" in result.err


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_device_that_is_not_there_is_a_mistake(rollfeed, settings_file, tmp_path, command: str) -> None:
    result = rollfeed(command, settings_file(), "--out", tmp_path / "run", "--set", "engine.device=cuda:77")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.startswith("rollfeed: engine.device = 'cuda:77': not usable here (")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: not enough memory: tried\nframe #0"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        MemoryError(),
    ],
)
def test_what_torch_raises_in_a_training_is_one_line_and_stored(
    rollfeed, settings_file, tmp_path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def backward(*_args: object, **_kwargs: object) -> None:
        raise error

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    out = tmp_path / "run"
    result = rollfeed("train", settings_file(TRAIN, num_rollout=1), "--out", out)
    assert result.code == 1
    assert "Traceback" not in result.err
    (line,) = (line for line in result.err.splitlines() if line.startswith("rollfeed:"))
    assert line.startswith(f"rollfeed: step 0: it cannot be trained on: {type(error).__name__}")
    assert "frame" not in line
    assert "cannot be trained on" in rollfeed("show", out).out.replace("\n", " ")


def test_what_torch_raises_anywhere_else_is_one_line_with_its_place(
    rollfeed, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_args: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nCUDA kernel errors might be")

    path = tmp_path / "in.jsonl"
    path.write_text('{"rm_type": "math"}\n')
    monkeypatch.setattr("json.loads", load)
    result = rollfeed("score", path, "--out", tmp_path / "out.jsonl")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert result.err.startswith("rollfeed: RuntimeError: CUDA error: an illegal memory access (")
    assert ", line " in result.err
