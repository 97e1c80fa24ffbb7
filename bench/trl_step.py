"""A step of training beside TRL's: ``rollfeed bench train`` and TRL's ``GRPOTrainer``, processes in turn.

Both get the same model in float32, the same prompts, the same verifier as reward, as many samples a prompt, new tokens
at most, temperature, learning rate and threads, no KL term, one update a step, and store nothing. Loading the model and
one step of warm-up are not counted; a step is generation, scoring, update, and for ours the new weights for the engine.
TRL gets what makes it fastest on a CPU: no gradient checkpointing, fused AdamW, SDPA attention, no logging, and the 32
samples of a step 8 at a time, which takes a fifth less time than all at once (``--trl-micro-batch``). Threads sleep
while they wait (``OMP_WAIT_POLICY=passive``, unless it is set), which a machine with other work needs. Sampled lengths
differ, so seconds are also given per 1,000 tokens.

TRL is in an environment of its own (``make bench-trl`` makes it)::

    python bench/trl_step.py --trl-python .venv-trl/bin/python --output bench/train.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

GOAL_RATIO = 4.0
PACKAGES = ("torch", "transformers", "numpy")
TRL_PACKAGES = ("trl", "accelerate", "datasets", *PACKAGES)
SOURCE = Path(__file__).resolve().parents[1] / "src"


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both in turn and return the figures."""
    from rollfeed.app import load_model
    from rollfeed.benchmarks.machine import machine

    model = load_model(arguments.model)
    found = machine()
    runs: dict[str, list[dict[str, Any]]] = {"rollfeed": [], "trl": []}
    for repetition in range(arguments.repetitions):
        seed = arguments.seed + repetition
        runs["rollfeed"].append(run_ours(arguments, model.checkpoint, seed))
        tell("rollfeed", runs["rollfeed"][-1])
        runs["trl"].append(run_trl(arguments, model, seed))
        tell("trl", runs["trl"][-1])
    summaries = {name: summary(of_both) for name, of_both in runs.items()}
    ratio = summaries["trl"]["step_seconds"] / summaries["rollfeed"]["step_seconds"]
    per_token = "seconds_per_1000_output_tokens"
    workload, *_ = [run.pop("workload") for run in runs["rollfeed"]]
    versions, *_ = [run.pop("versions") for run in runs["trl"]]
    return {
        "command": shlex.join(["python", *sys.argv]),
        "workload": {**workload, "num_repetitions": arguments.repetitions},
        "ratio": ratio,
        "ratio_by_repetition": [
            summary([theirs])["step_seconds"] / summary([ours])["step_seconds"]
            for ours, theirs in zip(runs["rollfeed"], runs["trl"], strict=True)
        ],
        "ratio_per_output_token": summaries["trl"][per_token] / summaries["rollfeed"][per_token],
        "ratio_of_cpu_time": summaries["trl"]["cpu_time"] / summaries["rollfeed"]["cpu_time"],
        "goal": {"ratio": GOAL_RATIO, "met": ratio >= GOAL_RATIO},
        **summaries,
        "runs": runs,
        "versions": {"rollfeed": {name: version(name) for name in PACKAGES}, "trl": versions},
        "machine": found,
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one side over all its measured steps."""
    steps = [step for run in runs for step in run["steps"]]
    seconds, tokens = sum(step["step_seconds"] for step in steps), sum(step["output_tokens"] for step in steps)
    parts = {name for step in steps for name in step if name.endswith("_seconds")} - {"step_seconds", "bound_seconds"}
    return {
        "step_seconds": median(step["step_seconds"] for step in steps),
        "cpu_time": median(step["cpu_time"] for step in steps),
        "by_step": [round(step["step_seconds"], 2) for step in steps],
        "seconds_per_1000_output_tokens": 1000 * seconds / tokens,
        "output_tokens_per_second": tokens / seconds,
        "mean_response_length": mean(step["mean_response_length"] for step in steps),
        "mean_part_seconds": {name: mean(step[name] for step in steps) for name in sorted(parts)},
    }


def tell(name: str, run: dict[str, Any]) -> None:
    steps = ", ".join(f"{step['step_seconds']:.1f} s ({step['output_tokens']} tokens)" for step in run["steps"])
    print(f"{name}: {steps}", file=sys.stderr, flush=True)


def environment() -> dict[str, str]:
    offline = {name: "1" for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")}
    return {"OMP_WAIT_POLICY": "passive", **os.environ, **offline, "PYTHONPATH": str(SOURCE)}


def run_ours(arguments: argparse.Namespace, checkpoint: Path, seed: int) -> dict[str, Any]:
    """Return what ``rollfeed bench train`` measured in a process of its own."""
    options = {"model": checkpoint, "steps": arguments.steps, "threads": arguments.threads, "seed": seed}
    command = [sys.executable, "-m", "rollfeed", "bench", "train", "--json"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    load = os.getloadavg()[0]
    finished = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, check=True, text=True)
    result = json.loads(finished.stdout)
    return {"seed": seed, "load_before": load, **{key: result[key] for key in ("workload", "share_of_bound", "steps")}}


def run_trl(arguments: argparse.Namespace, model: Any, seed: int) -> dict[str, Any]:
    """Return what TRL took for the same prompts in a process of its own."""
    from rollfeed.benchmarks.train import TrainWorkload, workload_source

    workload = TrainWorkload(num_steps=arguments.steps, threads=arguments.threads, seed=seed)
    source = workload_source(model.tokenizer, seed=seed)
    num_prompts = (workload.num_warmup_steps + workload.num_steps) * workload.rollout_batch_size
    prompts = asyncio.run(source.draw(num_prompts))
    job = {
        "checkpoint": str(model.checkpoint),
        "prompts": [
            {"text": prompt.text, "token_ids": prompt.token_ids.tolist(), "metadata": dict(prompt.metadata)}
            for prompt in prompts
        ],
        "micro_batch": arguments.trl_micro_batch,
        **{name: getattr(workload, name) for name in workload.__slots__},
    }
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "job.json"), Path(folder, "result.json")
        file.write_text(json.dumps(job), encoding="utf-8")
        command = [arguments.trl_python, str(Path(__file__).resolve()), "--trl-job", str(file), "--output", str(out)]
        subprocess.run(command, env=environment(), stdout=sys.stderr, check=True, cwd=folder)
        return {"seed": seed, "load_before": load, **json.loads(out.read_text(encoding="utf-8"))}


def train_with_trl(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train with TRL, in its environment, and return the figures of each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rollfeed.environments import EnvironmentRegistry
    from rollfeed.environments.verifying import verify_problem

    torch.set_num_threads(job["threads"])
    registry, watch = EnvironmentRegistry(), Stopwatch()
    tokenizer = AutoTokenizer.from_pretrained(job["checkpoint"], local_files_only=True)
    for prompt in job["prompts"]:
        assert tokenizer(prompt["text"])["input_ids"] == prompt["token_ids"], "TRL would tokenise the prompts otherwise"
    num_samples = job["rollout_batch_size"] * job["n_samples_per_prompt"]
    micro_batch = job["micro_batch"]
    arguments = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_samples // micro_batch,
        num_generations=job["n_samples_per_prompt"],
        max_completion_length=job["max_new_tokens"],
        temperature=job["temperature"],
        beta=0.0,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_steps=job["num_warmup_steps"] + job["num_steps"],
        shuffle_dataset=False,
        seed=job["seed"],
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )

    def reward(completions: list[str], completion_ids: list[list[int]], problem: list[str], **_: Any) -> list[float]:
        values = []
        for completion, text in zip(completions, problem, strict=True):
            metadata = json.loads(text)
            values.append(verify_problem(registry.get(metadata["environment"]), metadata, completion).reward)
        watch.note(completion_ids, values, job["max_new_tokens"])
        return values

    class Timed(GRPOTrainer):
        _generate = watch.timed("generation", GRPOTrainer._generate)
        _calculate_rewards = watch.timed("scoring", GRPOTrainer._calculate_rewards)
        compute_loss = watch.timed("forward", GRPOTrainer.compute_loss)
        training_step = watch.timed("training_step", GRPOTrainer.training_step)

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.end()

    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(
            job["checkpoint"], dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ),
        reward_funcs=reward,
        args=arguments,
        processing_class=tokenizer,
        callbacks=[Steps()],
        train_dataset=Dataset.from_list(
            [{"prompt": prompt["text"], "problem": json.dumps(prompt["metadata"])} for prompt in job["prompts"]]
        ),
    )
    trainer.train()
    return {
        "micro_batch": micro_batch,
        "steps": watch.steps[job["num_warmup_steps"] :],
        "versions": {name: version(name) for name in TRL_PACKAGES},
    }


class Stopwatch:
    """Adds up what the parts of each of TRL's steps take."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._began = self._computed_before = 0.0
        self._seconds: dict[str, float] = {}
        self._facts: dict[str, float] = {}

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

        return wrapped

    def note(self, completion_ids: list[list[int]], rewards: list[float], max_new_tokens: int) -> None:
        lengths = [len(ids) for ids in completion_ids]
        self._facts = {
            "output_tokens": sum(lengths),
            "mean_response_length": mean(lengths),
            "at_most_tokens_ratio": mean(length >= max_new_tokens for length in lengths),
            "reward_mean": mean(rewards),
        }

    def begin(self) -> None:
        self._seconds = {}
        self._began, self._computed_before = time.perf_counter(), time.process_time()

    def end(self) -> None:
        whole, taken = time.perf_counter() - self._began, self._seconds
        cpu_time = time.process_time() - self._computed_before
        inside = taken.pop("training_step")
        parts = {f"{name}_seconds": seconds for name, seconds in taken.items()}
        rest = {"backward_seconds": inside - sum(taken.values()), "optimizer_seconds": whole - inside}
        self.steps.append({"step_seconds": whole, "cpu_time": cpu_time, **parts, **rest, **self._facts})
        print(
            f"trl, {len(self.steps)}: {whole:.1f} s, {self._facts['output_tokens']} tokens", file=sys.stderr, flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, help="Python of the environment with TRL")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or folder (default: the built-in model)")
    parser.add_argument("--repetitions", type=int, default=2, help="of both (default 2)")
    parser.add_argument("--steps", type=int, default=3, help="measured in each repetition (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="of both (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the first repetition (default 0)")
    parser.add_argument("--trl-micro-batch", type=int, default=8, help="samples at a time in TRL (default 8)")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--trl-job", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trl_job is not None:
        job = json.loads(arguments.trl_job.read_text(encoding="utf-8"))
        result = train_with_trl(job, arguments.trl_job.parent / "trl")
        arguments.output.write_text(json.dumps(result), encoding="utf-8")
        return
    if arguments.trl_python is None or not arguments.trl_python.exists():
        parser.error("--trl-python: give the Python of an environment with TRL, for example .venv-trl/bin/python")
    arguments.trl_python = str(arguments.trl_python.absolute())
    if min(arguments.repetitions, arguments.steps, arguments.threads) < 1 or arguments.seed < 0:
        parser.error("--repetitions, --steps and --threads must be at least 1, --seed at least 0")
    if arguments.trl_micro_batch not in (8, 16, 32):
        parser.error(f"--trl-micro-batch {arguments.trl_micro_batch}: give 8, 16 or 32, whole groups of a step's 32")
    if not arguments.output.absolute().parent.is_dir():
        parser.error(f"--output {arguments.output}: there is no such folder")
    result = compare(arguments)
    text = json.dumps(result, indent=2) + "\n"
    arguments.output.write_text(text, encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "runs"}, indent=2))


if __name__ == "__main__":
    main()
