"""What a real training writes is what docs/metrics.md describes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from docs.pages.metrics import described_metrics

SETTINGS = """
[model]
checkpoint = "{model}"

[model.tiny]
characters = "abcdefghijrv:="

[[prompts.environments]]
id = "core/reverse_text"
level = 2
apply_chat_template = false
parameters = {{ style = "compact", alphabet_size = 10 }}

[rollout]
num_rollout = 3
rollout_batch_size = 8
n_samples_per_prompt = 4
mask_truncated = true

[sampling]
rollout_max_response_len = 6
rollout_skip_special_tokens = true

[reward.overlong]
cache = 2

[engine]
context_length = 64
threads = 1

[train]
threads = 1

[train.loss]
{loss}
correction = "truncate"
dual_clip = 3.0
"""
LOSSES = {
    "tiny": "kl_coefficient = 0.0",
    "tiny-moe": "kl_coefficient = 0.05\nreward_kl_coefficient = 0.01\nrouter_aux_loss_coefficient = 0.01",
}
ELSEWHERE = (
    *("engine/", "eval/", "judge/", "train/picture_", "train/pair_accuracy", "train/score_margin"),
    *("reward/label_agreement", "rollout/teacher_", "rollout/turns_mean", "rollout/tool_calls_"),
    "rollout/problem_generation_seed",
)
"""Of engines that are servers, of trackers, judges, pictures, pairs, rewards beside labels, teachers, episodes, and of
environments that adapt.
"""


def written_by(folder: Path) -> set[str]:
    lines = [line for name in ("metrics.jsonl", "train.jsonl") for line in (folder / name).read_text().splitlines()]
    return {name for line in lines for name in json.loads(line) if "/" in name}


def test_what_a_training_writes_is_described_and_the_other_way_round(tmp_path: Path) -> None:
    from rollfeed.cli.main import main

    written: set[str] = set()
    for model, loss in LOSSES.items():
        (tmp_path / "train.toml").write_text(SETTINGS.format(model=model, loss=loss))
        assert main(["train", str(tmp_path / "train.toml"), "--out", str(tmp_path / model)]) == 0
        written |= written_by(tmp_path / model)
    described = [name for each in described_metrics() for name in each.names]
    patterns = [re.compile(re.sub(r"<\w+>", ".+", name)) for name in described]
    assert not [name for name in written if not any(pattern.fullmatch(name) for pattern in patterns)]
    expected = {name for name in described if "<" not in name and not name.startswith(ELSEWHERE)}
    assert expected - written == set()
