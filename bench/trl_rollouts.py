"""TRL's ``GRPOTrainer`` with its own generation and with ``rollfeed.compat.trl``, processes in turn.

Both train the same float32 model with the same trainer, settings, prompts, seed and reward, one update a step, and
store nothing; only ``rollout_func`` differs. Two steps of warm-up are not counted. In those, what is sampled by
rollfeed is put through the trainer's own forward pass, with the first weights and with updated ones, and the largest
difference of a log-probability is stored. With rollfeed the rewards come twice, from TRL's reward function and from the
reward hub, and must be the same.

Training a step takes the same time both ways, so the ratio depends on how much of it generation is: with the tiny
model, whose passes cost little beside what a token costs in Python, nearly all; with SmolLM2 on a CPU a third.

    python bench/trl_rollouts.py --trl-python .venv-trl/bin/python --output bench/trl_rollouts.json

``--asynchronous`` has ``AsyncGRPOTrainer`` make the steps, with rollfeed alone. Two things of it need a GPU and have
stand-ins here: the look-up of its speed, and the attention kernel.
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
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from trl_step import TRL_PACKAGES, Stopwatch, environment

GOAL_RATIO = 2.0
GOAL_DIFFERENCE = 1e-3
NUM_WARMUP_STEPS = 2
SIDES = ("trl", "rollfeed")


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all models both ways and return the figures."""
    from rollfeed.benchmarks.machine import machine

    found, sides = machine(), ("asynchronous",) if arguments.asynchronous else SIDES
    models = [measure(arguments, name, sides) for name in arguments.model]
    return {
        "command": shlex.join(["python", *sys.argv]),
        "goal": {"ratio": GOAL_RATIO, "logprob_difference": GOAL_DIFFERENCE},
        "models": models,
        "machine": found,
    }


def measure(arguments: argparse.Namespace, name: str, sides: tuple[str, ...]) -> dict[str, Any]:
    """Return the steps of one model, each way, and print them side by side."""
    job = job_of(arguments, name)
    runs = {side: run(arguments, {**job, "side": side}) for side in sides}
    print_table(name, runs)
    seconds = {side: median(step["step_seconds"] for step in runs[side]["steps"]) for side in sides}
    found: dict[str, Any] = {
        "model": name,
        "workload": {key: value for key, value in job.items() if key not in ("prompts", "checkpoint")},
        "median_step_seconds": seconds,
        "runs": runs,
    }
    if "trl" in runs:
        generation = {side: median(each["generation_seconds"] for each in runs[side]["steps"]) for side in sides}
        found["ratio"] = seconds["trl"] / seconds["rollfeed"]
        found["ratio_of_generation"] = generation["trl"] / generation["rollfeed"]
        found["logprob_difference"] = max(runs["rollfeed"]["logprob_differences"])
    return found


def job_of(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    from rollfeed.app import load_settings_model
    from rollfeed.benchmarks.train import ENVIRONMENT, LEVEL, TrainWorkload
    from rollfeed.config import Settings
    from rollfeed.environments import EnvironmentRegistry, EnvironmentSource
    from rollfeed.prompts import ChatRenderer

    settings = {"model": {"checkpoint": name}, "prompts": {"environments": [{"id": ENVIRONMENT}]}}
    model = load_settings_model(Settings.model_validate(settings))
    workload = replace(
        TrainWorkload(),
        num_steps=arguments.steps,
        num_warmup_steps=NUM_WARMUP_STEPS,
        rollout_batch_size=arguments.prompts,
        n_samples_per_prompt=arguments.samples,
        max_new_tokens=arguments.tokens,
        threads=arguments.threads,
        seed=arguments.seed,
    )
    is_chat = model.tokenizer.has_chat_template
    source = EnvironmentSource(
        EnvironmentRegistry().get(ENVIRONMENT),
        level=LEVEL,
        seed=workload.seed,
        renderer=ChatRenderer(model.tokenizer, rollout_max_prompt_len=None),
        apply_chat_template=is_chat,
    )
    prompts = asyncio.run(source.draw_different((workload.num_steps + NUM_WARMUP_STEPS) * workload.rollout_batch_size))
    return {
        "checkpoint": str(model.checkpoint),
        "reward": "verifier" if is_chat else "variety",
        "prompts": [{"prompt": each.text, "metadata": json.dumps(dict(each.metadata))} for each in prompts],
        **{key: getattr(workload, key) for key in workload.__slots__},
    }


def run(arguments: argparse.Namespace, job: dict[str, Any]) -> dict[str, Any]:
    """Return what a process with TRL found."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "job.json"), Path(folder, "result.json")
        file.write_text(json.dumps(job), encoding="utf-8")
        command = [arguments.trl_python, str(Path(__file__).resolve()), "--job", str(file), "--output", str(out)]
        given = {**environment(), "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONWARNINGS": "ignore"}
        subprocess.run(command, env=given, stdout=sys.stderr, check=True, cwd=folder)
        return {"load_before": load, **json.loads(out.read_text(encoding="utf-8"))}


def print_table(name: str, runs: dict[str, dict[str, Any]]) -> None:
    print(f"{name}\nstep " + " ".join(f"{side + ' seconds':>20} {'reward':>8}" for side in runs))
    for number, steps in enumerate(zip(*(run["steps"] for run in runs.values()), strict=True)):
        cells = (f"{step['step_seconds']:>20.2f} {step['reward_mean']:>8.3f}" for step in steps)
        print(f"{number:>4} " + " ".join(cells), flush=True)


def train(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train one way, in TRL's environment, and return the figures of each step."""
    import torch

    from rollfeed.environments import EnvironmentRegistry
    from rollfeed.environments.verifying import verify_problem

    torch.set_num_threads(job["threads"])
    registry, watch = EnvironmentRegistry(), Stopwatch()

    def verify(
        completions: list[str], completion_ids: list[list[int]], metadata: list[str], **others: Any
    ) -> list[float]:
        values = []
        for completion, text in zip(completions, metadata, strict=True):
            if job["reward"] == "variety":
                values.append(variety(completion))
                continue
            about = json.loads(text)
            values.append(verify_problem(registry.get(about["environment"]), about, completion).reward)
        assert others.get("rollfeed_reward", values) == values, "rollfeed's own reward is another one"
        watch.note(completion_ids, values, job["max_new_tokens"])
        return values

    make = train_asynchronous if job["side"] == "asynchronous" else train_plain
    differences = make(job, folder, verify, watch)
    return {
        "steps": watch.steps[NUM_WARMUP_STEPS:],
        "logprob_differences": differences,
        "versions": {name: version(name) for name in TRL_PACKAGES},
    }


def variety(text: str) -> float:
    """Return the share of characters that are there for the first time: of a model that answers nothing right."""
    return len(set(text)) / max(1, len(text))


def variety_of(sample: Any, prompt: Any) -> float:
    return variety(sample.response)


def train_plain(job: dict[str, Any], folder: Path, verify: Any, watch: Stopwatch) -> list[float]:
    """Train with ``GRPOTrainer``; return the largest difference of a log-probability in each step of the warm-up."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from rollfeed.compat.trl import RolloutFunc
    from rollfeed.config import EngineSettings, PluginSettings, RewardSettings, RolloutConfig, SamplingSettings

    ours: dict[str, Any] = {}
    if job["side"] == "rollfeed":
        engine = EngineSettings(threads=job["threads"], context_length=1024)
        config = RolloutConfig(
            plugins=PluginSettings(reward=variety_of if job["reward"] == "variety" else None),
            sampling=SamplingSettings(rollout_skip_special_tokens=True),  # as TRL decodes what it scores
            reward=RewardSettings(override_environments=job["reward"] == "variety"),
        )
        ours["rollout_func"] = RolloutFunc(config, engine=engine, metadata_key="metadata")
    differences: list[float] = []

    class Timed(GRPOTrainer):
        _generate = watch.timed("generation", GRPOTrainer._generate)
        _calculate_rewards = watch.timed("scoring", GRPOTrainer._calculate_rewards)
        compute_loss = watch.timed("forward", GRPOTrainer.compute_loss)
        training_step = watch.timed("training_step", GRPOTrainer.training_step)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            found = super()._generate_and_score_completions(inputs)
            if ours and len(differences) < NUM_WARMUP_STEPS:
                differences.append(difference(self, found))
            return found

    rows = [{"prompt": each["prompt"], "metadata": each["metadata"]} for each in job["prompts"]]
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(
            job["checkpoint"], dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ),
        reward_funcs=verify,
        args=GRPOConfig(**common(job, folder), shuffle_dataset=False, beta=0.0),
        processing_class=AutoTokenizer.from_pretrained(job["checkpoint"], local_files_only=True),
        callbacks=[steps_of(watch)],
        train_dataset=Dataset.from_list(rows),
        **ours,
    )
    trainer.train()
    return differences


def difference(trainer: Any, found: dict[str, Any]) -> float:
    """Return how far the trainer's own log-probabilities of a batch are from those that it was given, at most."""
    import torch

    names = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")
    prompt_ids, completion_ids, prompt_mask, completion_mask = (found[name] for name in names)
    with torch.no_grad():
        logps, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([prompt_ids, completion_ids], dim=1),
            torch.cat([prompt_mask, completion_mask], dim=1),
            completion_ids.size(1),
            batch_size=8,
        )
    return float(((logps - found["sampling_per_token_logps"]).abs() * completion_mask).max())


def train_asynchronous(job: dict[str, Any], folder: Path, verify: Any, watch: Stopwatch) -> list[float]:
    """Train with ``AsyncGRPOTrainer``; return nothing to compare, since its samples are older than its weights."""
    import torch
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    from rollfeed.compat.trl import AsyncRollouts

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # asks CUDA for the name of the device
    packing._flash_attn = lambda: CpuAttention  # a kernel for GPUs, from a hub

    class Timed(AsyncGRPOTrainer):
        compute_loss = watch.timed("forward", AsyncGRPOTrainer.compute_loss)
        training_step = watch.timed("training_step", AsyncGRPOTrainer.training_step)

    args = AsyncGRPOConfig(**common(job, folder), token_budget=0)
    dataset = Dataset.from_list(job["prompts"])
    rollouts = AsyncRollouts(job["checkpoint"], args=args, train_dataset=dataset, reward_funcs=verify)
    with torch.autograd.set_grad_enabled(True):
        Timed(
            job["checkpoint"],
            args=args,
            train_dataset=dataset,
            callbacks=[steps_of(watch)],
            rollout_worker=rollouts,
            weight_transfer=rollouts,
        ).train()
    return []


class CpuAttention:
    """Stands for the GPU's kernel: attention of sequences laid end to end."""

    @staticmethod
    def flash_attn_varlen_func(
        query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, *_: Any, softmax_scale: float | None, **__: Any
    ) -> Any:
        import torch
        from torch.nn.functional import scaled_dot_product_attention as attend

        outputs, share = [], query.size(1) // key.size(1)
        for segment in range(len(starts_q) - 1):
            q = query[starts_q[segment] : starts_q[segment + 1]].transpose(0, 1)
            k, v = (
                each[starts_k[segment] : starts_k[segment + 1]].transpose(0, 1).repeat_interleave(share, 0)
                for each in (key, value)
            )
            # The last query is the last key: causal from the end.
            sees = torch.ones(q.size(1), k.size(1), dtype=torch.bool).tril(k.size(1) - q.size(1))
            outputs.append(attend(q, k, v, attn_mask=sees, scale=softmax_scale).transpose(0, 1))
        return torch.cat(outputs)


def common(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the arguments of both trainers."""
    num_samples = job["rollout_batch_size"] * job["n_samples_per_prompt"]
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "per_device_train_batch_size": min(8, num_samples),
        "gradient_accumulation_steps": max(1, num_samples // 8),
        "num_generations": job["n_samples_per_prompt"],
        "max_completion_length": job["max_new_tokens"],
        "temperature": job["temperature"],
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_steps": NUM_WARMUP_STEPS + job["num_steps"],
        "seed": job["seed"],
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def steps_of(watch: Stopwatch) -> Any:
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.end()

    return Steps()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, help="Python of the environment with TRL")
    parser.add_argument(
        "--model", action="append", help="name or folder; may be repeated (default: tiny, then the built-in model)"
    )
    parser.add_argument("--steps", type=int, default=10, help="measured each way (default 10)")
    parser.add_argument("--prompts", type=int, default=2, help="of a step (default 2)")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt (default 4)")
    parser.add_argument("--tokens", type=int, default=128, help="new ones at most (default 128)")
    parser.add_argument("--threads", type=int, default=2, help="both ways (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--asynchronous", action="store_true", help="the asynchronous trainer, with rollfeed alone")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job is not None:
        result = train(json.loads(arguments.job.read_text(encoding="utf-8")), arguments.job.parent / "trl")
        arguments.output.write_text(json.dumps(result), encoding="utf-8")
        return
    if arguments.trl_python is None or not arguments.trl_python.exists():
        parser.error("--trl-python: give the Python of an environment with TRL, for example .venv-trl/bin/python")
    arguments.trl_python = str(arguments.trl_python.absolute())
    arguments.model = arguments.model or ["tiny", "smollm2-135m-instruct"]
    if arguments.prompts * arguments.samples > 8 and arguments.prompts * arguments.samples % 8:
        parser.error("--prompts times --samples: at most 8, or a multiple of 8, since 8 samples are trained at a time")
    if not arguments.output.absolute().parent.is_dir():
        parser.error(f"--output {arguments.output}: there is no such folder")
    result = compare(arguments)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for each in result["models"]:
        print(json.dumps({name: value for name, value in each.items() if name != "runs"}, indent=2))


if __name__ == "__main__":
    main()
