"""Training an adapter beside training all weights: the reversing example and SmolLM2, from the same model each.

The tiny model of examples/reverse is random before its warm-up, and an adapter of random weights learns little: so one
run of all weights, warm-up and a first batch at a learning rate of 0 in all but name, makes the model that both begin
with. SmolLM2 begins with itself. Of each run: its curve, the bytes of what is published (weights as the checkpoint has
them, and the adapter's file), of the trainer's newest checkpoint, and the most memory of its process. With ``--busy``
the machine did other work at the same time, and seconds are of that.

::

    python bench/lora.py --output bench/lora.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import resource
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from training_runs import train

from rollfeed.benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[1]
REVERSE = ROOT / "examples" / "reverse" / "train.toml"
SMOLLM2 = ROOT / "examples" / "smollm2" / "train.toml"
RANK, ALPHA, FACTOR = 16, 32, 10.0
"""The learning rate of an adapter is so many times that of all weights."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--examples", nargs="+", choices=["reverse", "smollm2"], default=["reverse", "smollm2"])
    parser.add_argument("--batches", type=int, help="instead of the example's own number")
    parser.add_argument("--busy", action="store_true", help="the machine does other work")
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "busy": arguments.busy,
        "lora": {"rank": RANK, "alpha": ALPHA, "target_modules": "all-linear", "learning_rate_factor": FACTOR},
        "runs": [],
    }
    more = [] if arguments.batches is None else [f"rollout.num_rollout={arguments.batches}"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for example in arguments.examples:
            for seed in arguments.seeds:
                settings = SMOLLM2 if example == "smollm2" else begun_reverse(folder / f"begun-{seed}", seed)
                for kind in ("full", "lora"):
                    out = folder / f"{example}-{seed}-{kind}"
                    run = measured(settings, out, seed, [*more, *(lora_options(settings) if kind == "lora" else [])])
                    record["runs"].append({"example": example, "kind": kind, **run})
                    print({name: run[name] for name in ("seconds", "published_bytes", "max_memory_bytes")}, flush=True)
                    print(kind, example, seed, [round(point["accuracy"], 3) for point in run["curve"]], flush=True)
                    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def begun_reverse(folder: Path, seed: int) -> Path:
    """Make the model that both kinds begin with; return settings without the warm-up that it has had."""
    folder.mkdir()
    options = ["rollout.num_rollout=1", "train.optimizer.learning_rate=1e-12", "train.optimizer.warmup_updates=0"]
    train(REVERSE, folder / "run", seed=seed, overrides=options)
    text = REVERSE.read_text(encoding="utf-8").replace(
        'checkpoint = "tiny"', f'checkpoint = "{folder / "run" / "model"}"'
    )
    for section in ("model.tiny", "train.warm_up"):
        text = re.sub(rf"^\[{re.escape(section)}\]\n.*?(?=^\[|^#)", "", text, flags=re.MULTILINE | re.DOTALL)
    settings = folder / "train.toml"
    settings.write_text(text, encoding="utf-8")
    return settings


def lora_options(settings: Path) -> list[str]:
    rate = float(re.search(r"^learning_rate = (\S+)", settings.read_text(encoding="utf-8"), re.MULTILINE)[1])  # type: ignore[index]
    return [f"train.lora.rank={RANK}", f"train.lora.alpha={ALPHA}", f"train.optimizer.learning_rate={FACTOR * rate}"]


def measured(settings: Path, out: Path, seed: int, options: list[str]) -> dict[str, Any]:
    """Run the command from a process of its own, whose only child it is."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (settings, out, seed, options))


def _measured(settings: Path, out: Path, seed: int, options: list[str]) -> dict[str, Any]:
    run = train(settings, out, seed=seed, overrides=options)
    adapter = out / "model" / "adapter" / "adapter_model.safetensors"
    published = [adapter] if adapter.exists() else (out / "model").glob("*.safetensors")
    newest = max((out / "checkpoints").glob("step-*"))
    return {
        **run,
        "published_bytes": sum(path.stat().st_size for path in published),
        "checkpoint_bytes": sum(path.stat().st_size for path in newest.iterdir()),
        "max_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
    }


if __name__ == "__main__":
    main()
