"""Engine and trainer of models that transformers computes: the same log-probabilities, or a refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("architectures.py")
LEAST_AGREEING = 70
MOST_NOT_MADE = 6


def tried(model_types: list[str], folder: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), str(folder), *model_types]
    output = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    ).stdout
    return [json.loads(line) for line in output.splitlines()]


def test_engine_and_trainer_agree_before_and_after_an_update(tmp_path: Path) -> None:
    found = tried(["qwen3_moe", "gpt_neo", "bert"], tmp_path)
    assert [each["outcome"] for each in found] == ["agrees", "agrees", "refused"], found
    assert [each["shares"] for each in found[:2]] == [True, False]
    assert "it is not causal" in found[2]["reason"]


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_causal_architecture_agrees_or_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    num_processes = os.cpu_count() or 1
    parts = [sorted(NAMES)[number::num_processes] for number in range(num_processes)]
    with ThreadPoolExecutor(num_processes) as pool:
        folders = [tmp_path / str(number) for number in range(num_processes)]
        found = [each for some in pool.map(tried, parts, folders) for each in some]
    found.sort(key=lambda each: each["model_type"])
    counts = Counter(each["outcome"] for each in found)
    with capsys.disabled():
        print()
        for each in found:
            print(f"{each['model_type']:28} {each['outcome']:9} {_detail(each)}")
        print(f"{len(found)} architectures: {dict(counts)}")
    assert {each["model_type"] for each in found} == set(NAMES)
    assert [each["model_type"] for each in found if each["outcome"] == "wrong"] == []
    assert counts["agrees"] >= LEAST_AGREEING
    assert counts["not made"] <= MOST_NOT_MADE
    assert all(each["reason"] for each in found if each["outcome"] == "refused")


def _detail(found: dict[str, Any]) -> str:
    if found["outcome"] != "agrees":
        return str(found["reason"])
    return f"within {found['largest']:.1e}, prompts {'shared' if found['shares'] else 'apart'}"
