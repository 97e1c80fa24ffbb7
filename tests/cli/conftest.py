from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

SETTINGS = """
seed = 3

[model]
checkpoint = "{checkpoint}"

[rollout]
n_samples_per_prompt = 2

[sampling]
rollout_max_response_len = 4

[engine]
threads = 1
num_slots = 8
context_length = 384

[eval]
num_prompts = 3

[[eval.environments]]
id = "core/reverse_text"
parameters = {{ style = "compact", alphabet_size = 10 }}
apply_chat_template = false
level = 2

[[eval.datasets]]
path = "questions.jsonl"
label_key = "answer"
rm_type = "exact"
temperature = 0
n_samples_per_prompt = 1
"""


@pytest.fixture
def settings_file(tmp_path: Path, tiny_checkpoint: Path) -> Callable[..., Path]:
    """Return a function that writes a settings file with two eval sets over the tiny model."""

    def write(extra: str = "") -> Path:
        rows = [{"prompt": f"question {number}", "answer": str(number)} for number in range(5)]
        (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = tmp_path / "eval.toml"
        path.write_text(SETTINGS.format(checkpoint=tiny_checkpoint) + extra)
        return path

    return write
