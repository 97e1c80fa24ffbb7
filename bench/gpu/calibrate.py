"""The accuracy of SmolLM2-135M by level of every built-in environment, on one GPU.

::

    python bench/gpu/calibrate.py --model MODEL --output bench/gpu/calibration.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from rollfeed import app
from rollfeed.config import EngineSettings, SamplingSettings
from rollfeed.environments import EnvironmentRegistry

ENVIRONMENTS = (
    "core/compare_max",
    "core/add_numbers",
    "core/copy_text",
    "core/count_symbol",
    "core/constrained_words",
    "core/reverse_text",
)
NUM_LEVELS, NUM_SAMPLES, MAX_RESPONSE_LEN = 6, 200, 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    model = app.load_model(arguments.model)
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "card": torch.cuda.get_device_name(),
        "num_samples": NUM_SAMPLES,
        "max_response_len": MAX_RESPONSE_LEN,
        "levels": [level for environment in ENVIRONMENTS for level in asyncio.run(levels_of(environment, model))],
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


async def levels_of(environment: str, model: app.Model) -> list[dict[str, Any]]:
    hardest = EnvironmentRegistry().get(environment).max_level
    (found,) = await app.calibrate_environments(
        {environment: range(NUM_LEVELS if hardest is None else min(NUM_LEVELS, hardest + 1))},
        model=model,
        num_samples=NUM_SAMPLES,
        sampling=SamplingSettings(rollout_max_response_len=MAX_RESPONSE_LEN, rollout_skip_special_tokens=True),
        engine_settings=EngineSettings(device="cuda:0", num_slots=256, context_length=512),
    )
    return [
        {
            "environment": environment,
            "level": each.level,
            "accuracy": each.found.accuracy,
            "accuracy_low": each.found.accuracy_interval.low,
            "accuracy_high": each.found.accuracy_interval.high,
            "response_length_mean": each.found.response_length_mean,
            "truncated_ratio": each.found.truncated_ratio,
        }
        for each in found.levels
    ]


if __name__ == "__main__":
    main()
