from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollfeed.cli.main import main

SETTINGS = """
[model]
checkpoint = "{checkpoint}"

[[prompts.environments]]
id = "core/copy_text"

[rollout]
num_rollout = 1
rollout_batch_size = 1
n_samples_per_prompt = 2

[sampling]
rollout_max_response_len = 8

[engine]
threads = 1
context_length = 384

[train]
"""


def test_what_draws_is_asked_for_before_anything_is_started(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, out = tmp_path / "settings.toml", tmp_path / "run"
    settings.write_text(SETTINGS.format(checkpoint=tiny_checkpoint))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["train", str(settings), "--out", str(out)]) == 2
    assert "pip install 'rollfeed[train]'" in capsys.readouterr().err
    assert not out.exists()
