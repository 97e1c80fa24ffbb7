"""Training an adapter beside training all weights: the reversing example and SmolLM2, from the same model each.

The tiny model of examples/reverse is random before its warm-up, and an adapter of random weights learns little: so one
run of all weights, warm-up and a first batch at a learning rate of 0 in all but name, makes the model that both begin
with. No adapter changes its head and its last norm, under which no token has more than a probability of 0.85 to 0.88
(``largest_probability``, a mean over tokens): four symbols are right in 0.5 to 0.6 of the samples at most, whatever
the layers below say. The kind ``frozen`` is the control: all weights are trained but embeddings, head and norms.
SmolLM2 begins with itself.

Of each run: its curve, the bytes of what is published (weights as the checkpoint has them, and the adapter's file), of
the trainer's newest checkpoint and of the moments in it, and the most memory of its process; with ``--smollm2-set
train.device=cuda:0`` that of the GPU as well, which is the trainer's alone, as the engine is on the CPU. The reversing
example is always trained on the CPU. With ``--busy`` the machine did other work at the same time; seconds are of that,
and of ``--jobs`` runs at a time.

::

    python bench/lora.py --output bench/lora.json
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from training_runs import records, train
from transformers import AutoModelForCausalLM

from rollfeed.benchmarks.client_process import peak_bytes
from rollfeed.benchmarks.machine import machine
from rollfeed.cli import main as cli
from rollfeed.config import RunSpec
from rollfeed.training.checkpoint import TENSORS_FILE

ROOT = Path(__file__).resolve().parents[1]
REVERSE = ROOT / "examples" / "reverse" / "train.toml"
SMOLLM2 = ROOT / "examples" / "smollm2" / "train.toml"
RANK, ALPHA = 16, 32
FACTORS = {"reverse": 3.0, "smollm2": 25.0}
"""The learning rate of an adapter is so many times that of all weights."""
FROZEN = ["embed_tokens", "norm"]
"""All that ``frozen`` leaves as it is, which is all that an adapter of all linear layers does not reach."""
COMMAND = "train"
"""This file with this word first is ``rollfeed train``, and tells of the memory in the end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--examples", nargs="+", choices=["reverse", "smollm2"], default=["reverse", "smollm2"])
    parser.add_argument("--batches", type=int, help="instead of the example's own number")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the reversing example, its warm-up included")
    parser.add_argument("--smollm2-set", action="append", default=[], help="as --set of rollfeed train, for SmolLM2")
    parser.add_argument(
        "--factors", type=float, nargs="+", help="rates of adapters over those of all weights, to choose"
    )
    parser.add_argument("--kinds", nargs="+", choices=["full", "lora", "frozen"], default=["full", "lora"])
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--busy", action="store_true", help="the machine does other work")
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "busy": arguments.busy,
        "lora": {"rank": RANK, "alpha": ALPHA, "target_modules": "all-linear"},
        "runs": [],
    }
    of_reverse = ["train.device=cpu", f"sampling.rollout_temperature={arguments.temperature}"]
    options = {"smollm2": arguments.smollm2_set, "reverse": of_reverse}
    more = [] if arguments.batches is None else [f"rollout.num_rollout={arguments.batches}"]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(arguments.jobs) as pool:
        folder = Path(temporary)
        # They are first in the queue, as runs wait for them.
        seeds = arguments.seeds if "reverse" in arguments.examples else []
        begun = {seed: pool.submit(begun_reverse, folder / f"begun-{seed}", seed, of_reverse) for seed in seeds}
        runs = [
            pool.submit(run_of, folder, example, seed, kind, factor, [*options[example], *more], begun.get(seed))
            for example in arguments.examples
            for seed in arguments.seeds
            for kind in arguments.kinds
            for factor in (arguments.factors or [FACTORS[example]] if kind == "lora" else [1.0])
        ]
        for done in as_completed(runs):
            if failure := done.exception():
                print(f"a run failed: {failure}", file=sys.stderr, flush=True)
                continue
            run = done.result()
            record["runs"].append(run)
            print(
                {
                    name: each
                    for name, each in run.items()
                    if name not in ("overrides", "curve", "change", "entropy_of_every_tenth")
                },
                flush=True,
            )
            print([round(point["accuracy"], 3) for point in run["curve"]], flush=True)
            arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if len(record["runs"]) < len(runs):
        raise SystemExit(1)


def run_of(
    folder: Path, example: str, seed: int, kind: str, factor: float, options: list[str], begun: Future[Path] | None
) -> dict[str, Any]:
    """Make one run, of the reversing example when the model that it begins with is there; return its record.

    ``factor`` is that of the learning rate.
    """
    settings = begun.result() if example == "reverse" and begun else SMOLLM2
    out = folder / f"{example}-{seed}-{kind}-{factor}"
    frozen = [f"train.freeze_params={json.dumps(FROZEN)}"]
    of_kind = {"full": [], "lora": lora_options(settings, factor), "frozen": frozen}
    overrides = [*options, *of_kind[kind]]
    run = train(settings, out, seed=seed, overrides=overrides, program=(__file__, COMMAND))
    adapter = out / "model" / "adapter" / "adapter_model.safetensors"
    published = [adapter] if adapter.exists() else (out / "model").glob("*.safetensors")
    newest = max((out / "checkpoints").glob("step-*"))
    with safe_open(newest / TENSORS_FILE, "pt") as file:
        moments = [file.get_tensor(name).nbytes for name in file.keys() if name.startswith("exp_avg")]  # noqa: SIM118
    temperature = RunSpec.load(settings, overrides).settings.sampling.rollout_temperature
    bound = {} if example == "smollm2" else {"largest_probability": largest_probability(out / "model", temperature)}
    return {
        "example": example,
        "kind": kind,
        "learning_rate_factor": factor,
        **run,
        "published_bytes": sum(path.stat().st_size for path in published),
        "checkpoint_bytes": sum(path.stat().st_size for path in newest.iterdir()),
        "moments_bytes": sum(moments),
        **bound,
        "entropy_of_every_tenth": [round(each["train/entropy"], 4) for each in records(out / "train.jsonl")[::10]],
        **json.loads(memory_file(out).read_text(encoding="utf-8")),
    }


def begun_reverse(folder: Path, seed: int, options: list[str]) -> Path:
    """Make the model that both kinds begin with; return settings without the warm-up that it has had."""
    folder.mkdir()
    still = ["rollout.num_rollout=1", "train.optimizer.learning_rate=1e-12", "train.optimizer.warmup_updates=0"]
    train(REVERSE, folder / "run", seed=seed, overrides=[*options, *still])
    text = REVERSE.read_text(encoding="utf-8").replace(
        'checkpoint = "tiny"', f'checkpoint = "{folder / "run" / "model"}"'
    )
    for section in ("model.tiny", "train.warm_up"):
        text = re.sub(rf"^\[{re.escape(section)}\]\n.*?(?=^\[|^#)", "", text, flags=re.MULTILINE | re.DOTALL)
    settings = folder / "train.toml"
    settings.write_text(text, encoding="utf-8")
    return settings


def largest_probability(folder: Path, temperature: float) -> float:
    """Return what the likeliest token can have at most, as a mean over tokens.

    It is of the head and the last norm alone: of a hidden state that is looked for, for each token.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weight_VD, scale_D = model.get_output_embeddings().weight.detach(), model.model.norm.weight.detach()
    # Row v is for token v.
    hidden_VD = torch.nn.Parameter(scale_D * (weight_VD - weight_VD.mean(0)))
    optimizer = torch.optim.Adam([hidden_VD], lr=0.05)
    for _ in range(400):
        normed_VD = hidden_VD * hidden_VD.square().mean(1, keepdim=True).rsqrt()
        logprobs_V = torch.log_softmax(normed_VD * scale_D @ weight_VD.T / temperature, -1).diagonal()
        optimizer.zero_grad()
        (-logprobs_V.sum()).backward()
        optimizer.step()
    return round(float(logprobs_V.detach().exp().mean()), 4)


def lora_options(settings: Path, factor: float) -> list[str]:
    rate = float(re.search(r"^learning_rate = (\S+)", settings.read_text(encoding="utf-8"), re.MULTILINE)[1])  # type: ignore[index]
    return [
        f"train.lora.rank={RANK}",
        f"train.lora.alpha={ALPHA}",
        f"train.optimizer.learning_rate={factor * rate:.6g}",
    ]


def memory_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.memory.json")


def command(arguments: list[str]) -> int:
    """Do what the command does, and write the most memory that it has had beside its folder."""
    code = cli.main([COMMAND, *arguments])
    found = {"max_memory_bytes": peak_bytes()}
    if torch.cuda.is_initialized():
        found["max_gpu_bytes"] = torch.cuda.max_memory_allocated()
    memory_file(Path(arguments[arguments.index("--out") + 1])).write_text(json.dumps(found), encoding="utf-8")
    return code


if __name__ == "__main__":
    if sys.argv[1:2] == [COMMAND]:
        sys.exit(command(sys.argv[2:]))
    main()
