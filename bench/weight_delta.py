"""Bytes of weight deltas of real GRPO steps, beside the entropy of what changed.

SmolLM2-135M, rounded to bf16 as it is served, is trained by GRPO on answers of ``core/compare_max`` that are rewarded
for the letter e, at several learning rates. Each step is published to a receiver's
store, and the folder compared.

The entropy is that of a model which knows, of each tensor, how many elements change and how often which difference
occurs: n H(k / n) for the positions of k of n elements, and k times the entropy of the differences' own distribution.
``given_exponents`` is that of a model which also knows how many elements of each sign and exponent change::

    python bench/weight_delta.py --output bench/weight_delta.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import rollfeed
from rollfeed.benchmarks.machine import machine
from rollfeed.config.optimizer import OptimizerSettings
from rollfeed.config.train import TrainSettings
from rollfeed.engine.local import create_local_engine
from rollfeed.training.trainer import Trainer
from rollfeed.types import TensorUpdate
from rollfeed.weights import DiskTransport
from rollfeed.weights.transports.delta import CheckpointStore
from rollfeed.weights.transports.delta.files import CheckpointPieces
from rollfeed.weights.transports.delta.transport import PublishedVersion


def entropy_of(counts: NDArray[np.int64]) -> float:
    """Return the bits of an element that is drawn with these counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def bits_of_change(old: NDArray[np.uint16], new: NDArray[np.uint16]) -> dict[str, float]:
    """Return what the models need for one tensor in bf16."""
    is_changed = old != new
    num_changed = int(is_changed.sum())
    exponents = old >> 7
    among, all_of = (np.bincount(each, minlength=512) for each in (exponents[is_changed], exponents))
    _, counts = np.unique(new[is_changed] - old[is_changed], return_counts=True)
    values = num_changed * entropy_of(counts) if num_changed else 0.0
    by_exponent = [(k, n) for k, n in zip(among.tolist(), all_of.tolist(), strict=True) if n]
    return {
        "elements": len(old),
        "changed": num_changed,
        "positions": len(old) * entropy_of(np.array([num_changed, len(old) - num_changed])),
        "positions_given_exponents": sum(n * entropy_of(np.array([k, n - k])) for k, n in by_exponent),
        "values": values,
    }


def published_step(before: PublishedVersion, folder: Path, store: CheckpointStore, version: int) -> Any:
    """Publish a version, and return it with its figures."""
    began = time.perf_counter()
    published = PublishedVersion(folder, policy_version=version, before=before)
    encoded = time.perf_counter()
    held = store.receive(published.delta)
    decoded = time.perf_counter()
    assert (Path(held.folder) / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    totals = dict.fromkeys(("elements", "changed", "positions", "positions_given_exponents", "values"), 0.0)
    old, new = before._pieces, CheckpointPieces(folder)
    for key in new.spans:
        if key[1]:
            for name, bits in bits_of_change(old.read(key).view("<u2"), new.read(key).view("<u2")).items():
                totals[name] += bits
    num_bytes = published.delta.stat().st_size
    entropy = (totals["positions"] + totals["values"]) / 8
    given = (totals["positions_given_exponents"] + totals["values"]) / 8
    return published, {
        "density": float(f"{totals['changed'] / totals['elements']:.4g}"),
        "bytes": num_bytes,
        "entropy_bytes": round(entropy),
        "bytes_to_entropy": round(num_bytes / entropy, 4) if entropy else None,
        "bytes_to_entropy_given_exponents": round(num_bytes / given, 4) if given else None,
        "bits_a_change": round(8 * num_bytes / totals["changed"], 2) if totals["changed"] else None,
        "encode_seconds": round(encoded - began, 3),
        "decode_seconds": round(decoded - encoded, 3),
    }


async def trained(arguments: argparse.Namespace, rate: float, work: Path) -> dict[str, Any]:
    """Train at a learning rate and publish every step."""

    def letters(sample: Any, prompt: Any) -> float:
        return sample.response.count("e") / max(1, len(sample.response))

    model = rollfeed.load_model()
    checkpoint = bf16_checkpoint(model.checkpoint, work / "checkpoint")
    settings = TrainSettings(
        optimizer=OptimizerSettings(learning_rate=rate), threads=arguments.threads, micro_batch_tokens=768
    )
    trainer = Trainer(
        checkpoint, settings=settings, temperature=1.0, num_batches=1000, max_response_length=arguments.response
    )
    engine = create_local_engine(
        checkpoint=checkpoint,
        tokenizer=model.tokenizer,
        threads=arguments.threads,
        num_slots=16,
        context_length=256,
        deterministic=False,
        precision="fp32",
    )
    config = rollfeed.RolloutConfig(
        seed=arguments.seed,
        rollout=rollfeed.RolloutSettings(rollout_batch_size=arguments.groups, n_samples_per_prompt=4),
        reward=rollfeed.RewardSettings(override_environments=True),
        plugins=rollfeed.PluginSettings(reward=letters),
        sampling=rollfeed.SamplingSettings(rollout_max_response_len=arguments.response),
    )
    source = rollfeed.environment_source("core/compare_max", level=1, seed=arguments.seed, tokenizer=model.tokenizer)
    disk = DiskTransport(work / "published", checkpoint=checkpoint)
    steps = []
    with closing(CheckpointStore(work / "received")) as store:
        first = disk.write(trainer.weights(), policy_version=0)
        published = PublishedVersion(first, policy_version=0, before=None)
        began = time.perf_counter()
        whole = await published.whole()
        seconds, whole_bytes = time.perf_counter() - began, whole.stat().st_size
        store.receive(whole)
        async with rollfeed.open_rollouts(config, source=source, engine=engine, tokenizer=model.tokenizer) as rollouts:
            for version in range(1, arguments.steps + 1):
                batch = await rollouts.generate_batch()
                report = await asyncio.to_thread(trainer.train_step, batch)
                folder = disk.write(trainer.weights(), policy_version=version)
                published, figures = published_step(published, folder, store, version)
                await engine.apply(TensorUpdate(trainer.weights(), policy_version=version))
                steps.append(figures)
                print(f"{rate:g} step {version} ({report.seconds:.0f} s): {figures}", flush=True)
    num_bytes, entropy = (sum(each[name] for each in steps) for name in ("bytes", "entropy_bytes"))
    return {
        "whole_bytes": folder.joinpath("model.safetensors").stat().st_size,
        "whole_sent_bytes": whole_bytes,
        "whole_encode_seconds": round(seconds, 3),
        "bytes_to_entropy": round(num_bytes / entropy, 4) if entropy else None,
        "steps": steps,
    }


def bf16_checkpoint(source: Path, folder: Path) -> Path:
    """Return a checkpoint with tensors of bf16, as most are."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = {name: each.bfloat16() for name, each in load_file(source / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--response", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    record: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "machine": machine(), "rates": {}}
    for rate in arguments.rates:
        with tempfile.TemporaryDirectory() as work:
            record["rates"][f"{rate:g}"] = asyncio.run(trained(arguments, rate, Path(work)))
        record["load_average"] = [round(each, 1) for each in os.getloadavg()]
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
