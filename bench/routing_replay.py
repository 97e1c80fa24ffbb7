"""Measures how far engine and trainer are apart on a small mixture of experts, with and without routing replay.

``python bench/routing_replay.py --output bench/routing_replay.json``: the embedded engine answers in fp32, as it does
on a CPU, and the trainer computes with the same weights in bf16, and in fp32 for comparison. Told are the share of
choices of experts that differ, and the mismatch of the sampled tokens: the mean of the k3 estimate of the divergence
and the largest difference of a log-probability, over the same answers in both cases. ``--seeds`` are models of their
own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollfeed.config import TinyModelSettings
from rollfeed.config.train import TrainSettings
from rollfeed.engine.local import create_local_engine
from rollfeed.engine.tiny import tiny_checkpoint
from rollfeed.model_files.expert_choices import Routers
from rollfeed.prompts.tokenizer import load_tokenizer
from rollfeed.protocols import Engine
from rollfeed.testing import sample_of
from rollfeed.training.trainer import Trainer
from rollfeed.types import Sample, SamplingParams

PARAMS = SamplingParams(max_new_tokens=1, return_routed_experts=True)


def embedded(checkpoint: Path) -> Engine:
    """Return the embedded engine on the CPU."""
    return create_local_engine(
        checkpoint=checkpoint, tokenizer=load_tokenizer(checkpoint), threads=1, num_slots=8, context_length=512,
        deterministic=False, device="cpu",
    )  # fmt: skip


def answers(engine: Engine, *, num_prompts: int, length: int) -> list[Sample]:
    """Return what an engine answers to prompts of a few tokens."""
    random = np.random.default_rng(0)
    prompts = [random.integers(2, 40, 12).astype(np.int32) for _ in range(num_prompts)]

    async def main() -> list[Sample]:
        found = []
        async with engine:
            asked = [
                engine.generate(prompt, replace(PARAMS, max_new_tokens=length, seed=number), request_id=str(number))
                for number, prompt in enumerate(prompts)
            ]
            for number, (prompt, made) in enumerate(zip(prompts, await asyncio.gather(*asked), strict=True)):
                found.append(
                    sample_of(
                        prompt.tolist(), made.token_ids.tolist(), logprobs=made.logprobs, index=number,
                        rollout_id=number, routed_experts=made.routed_experts,
                    )
                )  # fmt: skip
        return found

    return asyncio.run(main())


def differing_choices(trainer: Trainer, samples: list[Sample]) -> float:
    """Return the share of tokens and layers for which the trainer would choose other experts than the engine."""
    model, device = trainer.policy.model, trainer.device
    routers = Routers(model)
    differ = []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids[:-1].astype(np.int64))[None].to(device)
        dtype = trainer.policy.autocast
        with (
            torch.no_grad(),
            torch.autocast(device.type, dtype=dtype, enabled=dtype is not None),
            routers.watching() as chosen,
        ):
            model(input_ids=ids, use_cache=False)
        own = np.sort(torch.stack(chosen, 1).cpu().numpy())
        assert sample.routed_experts is not None
        theirs = np.sort(sample.routed_experts.numbers.reshape(own.shape))
        differ.append((own != theirs).any(axis=-1).reshape(-1))
    return float(np.concatenate(differ).mean())


def mismatch(trainer: Trainer, samples: list[Sample]) -> dict[str, float]:
    """Return what sampled tokens say of the difference to the trainer, in nats."""
    ratios = np.concatenate([own - s.logprobs for own, s in zip(trainer.logprobs(samples), samples, strict=True)])
    ratios = ratios.astype(np.float64)
    return {
        "k3": float((np.exp(ratios) - 1 - ratios).mean()),
        "abs_mean": float(np.abs(ratios).mean()),
        "abs_max": float(np.abs(ratios).max()),
    }


def measured(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return one model's figures."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_checkpoint(TinyModelSettings(), seed=seed, cache_directory=Path(folder), has_experts=True)
        samples = answers(embedded(checkpoint), num_prompts=arguments.prompts, length=arguments.length)
        return {"seed": seed, **compared(checkpoint, samples, device="cpu")}


def compared(checkpoint: Path, samples: list[Sample], *, device: str) -> dict[str, Any]:
    """Return the figures of trainers in both precisions, with and without replay."""
    row: dict[str, Any] = {"tokens": sum(each.response_length for each in samples)}
    for precision in ("bf16", "fp32"):
        row[precision] = {}
        for replays in (False, True):
            settings = TrainSettings(device=device, threads=1, precision=precision, routing_replay=replays)
            trainer = Trainer(checkpoint, settings=settings, temperature=1.0, num_batches=1, max_response_length=1024)
            row[precision]["replayed" if replays else "own"] = mismatch(trainer, samples)
            if not replays:
                row[precision]["differing_choices"] = differing_choices(trainer, samples)
        own, replayed = row[precision]["own"]["k3"], row[precision]["replayed"]["k3"]
        row[precision]["k3_own_over_replayed"] = own / max(replayed, 1e-30)
    return row


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    told = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, torch {torch.__version__}",
        "models": [measured(seed, arguments) for seed in arguments.seeds],
    }
    arguments.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
