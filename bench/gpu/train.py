"""Twenty steps of training on a GPU: embedded engine and trainer on one card.

::

    python bench/gpu/train.py --model PATH --output bench/gpu/train.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sglang import machine

SETTINGS = """
seed = {seed}
[model]
checkpoint = "{model}"
[rollout]
mode = "{mode}"
num_rollout = {steps}
rollout_batch_size = 16
n_samples_per_prompt = 16
over_sampling_batch_size = 24
refill_granularity = 1
[sampling]
rollout_max_response_len = 64
rollout_skip_special_tokens = true
[engine]
device = "cuda:0"
num_slots = 256
context_length = 512
[train]
checkpoint_interval = 10
micro_batch_tokens = 32768
eval_interval = 10
[train.loss]
correction = "truncate"
[train.optimizer]
learning_rate = 2e-5
[[filters.dynamic_sampling]]
name = "reward_std"
[[prompts.environments]]
id = "core/compare_max"
level = 1
[eval]
num_prompts = 128
n_samples_per_prompt = 1
[[eval.environments]]
id = "core/compare_max"
level = 1
"""


def main() -> None:
    """Read the arguments, train, and write what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint with its tokenizer")
    parser.add_argument("--mode", choices=["sync", "partial", "async"], default="sync", help="rollout.mode")
    parser.add_argument("--steps", type=int, default=20, help="batches to train on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "train.toml"), Path(folder, "run")
        text = SETTINGS.format(
            seed=arguments.seed, model=arguments.model.absolute(), steps=arguments.steps, mode=arguments.mode
        )
        file.write_text(text, encoding="utf-8")
        started = time.perf_counter()
        command = [sys.executable, "-m", "rollfeed", "train", str(file), "--out", str(out)]
        code = subprocess.run(command, check=False).returncode
        seconds = time.perf_counter() - started
        rollouts, training, evaluations = (
            [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()]
            for name in ("metrics.jsonl", "train.jsonl", "eval.jsonl")
        )
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "exit_code": code,
        "seconds": round(seconds, 1),
        "settings": text,
        **figures(rollouts, training),
        "evaluations": evaluations,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name not in ("by_step", "settings")})[:3000])


def figures(rollouts: list[dict[str, Any]], training: list[dict[str, Any]]) -> dict[str, Any]:
    """Return rates over all steps but the first, and some figures of each."""
    generated = sum(step["rollout/generated_tokens"] for step in rollouts[1:])
    computed = sum(step.get("train/computed_tokens", 0.0) for step in training[1:])
    names = ("train/loss", "train/grad_norm", "train/mismatch_kl", "seconds")
    return {
        "num_steps": len(training),
        "generated_tokens_per_second": round(generated / sum(step["perf/step_seconds"] for step in rollouts[1:])),
        "trained_tokens_per_second": round(computed / sum(step["seconds"] for step in training[1:])),
        "by_step": {
            **{name: [step.get(name) for step in training] for name in names},
            "reward_mean": [step["rollout/reward_mean"] for step in rollouts],
            "step_seconds": [round(step["perf/step_seconds"], 3) for step in rollouts],
        },
    }


if __name__ == "__main__":
    main()
