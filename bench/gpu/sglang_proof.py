"""Parts of ``sglang.py`` that train: the proof of published weights, versions under load, five steps.

Axes: R response tokens of one request.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

import rollfeed
from rollfeed.config.optimizer import OptimizerSettings
from rollfeed.config.train import TrainSettings
from rollfeed.engine.backends.native.places import quantised
from rollfeed.engine.client import ServerEngine
from rollfeed.training.probe import choose_texts, rounding_of, score_texts, weight_types
from rollfeed.training.trainer import Trainer
from rollfeed.types import Completion, FolderUpdate, SamplingParams, TensorUpdate, WeightProbe
from rollfeed.weights import EngineProof, Scores, compare

if TYPE_CHECKING:
    from sglang import Bench

LEARNING_RATE = 1e-5
NUM_PUBLISHES = 20
OTHER_WEIGHTS_AT = (1, 5, 20)
NUM_TEXTS, NUM_TOKENS = 64, 64
NUM_REQUESTS, NEW_TOKENS, NUM_UPDATES, SECONDS_BETWEEN = 48, 1200, 4, 0.7
MATRIX = "model.layers.{}.mlp.down_proj.weight"
TRAIN = """seed = {seed}
[model]
checkpoint = "{checkpoint}"
[[prompts.environments]]
id = "core/compare_max"
level = 1
[rollout]
mode = "{rollout}"
num_rollout = 5
rollout_batch_size = 32
n_samples_per_prompt = 8
[sampling]
rollout_max_response_len = 64
[engine]
context_length = 2048
[engine.sglang]
workers = ["{server}"]
weight_update = "{update}"
[train.optimizer]
learning_rate = 1e-5
"""
Tensors = dict[str, torch.Tensor]


class Publisher:
    """A trainer beside the server."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.trainer = Trainer(
            bench.model.checkpoint,
            settings=TrainSettings(optimizer=OptimizerSettings(learning_rate=LEARNING_RATE)),
            temperature=1.0,
            num_batches=1000,
            max_response_length=64,
        )
        self.first: Tensors = {name: tensor.clone() for name, tensor in self.trainer.weights().items()}

    def score(self, texts: Sequence[NDArray[np.int32]], held: str) -> NDArray[np.float64]:
        """Return the trainer's log-probabilities with its weights held as a type."""
        return score_texts(
            self.trainer.policy, texts, rounding=rounding_of(held, to_int8=quantised), micro_batch_tokens=16_384
        )

    async def proof(self) -> dict[str, Any]:
        bench = self.bench
        config = rollfeed.RolloutConfig(
            seed=bench.arguments.seed,
            rollout=rollfeed.RolloutSettings(rollout_batch_size=32, n_samples_per_prompt=8),
            sampling=rollfeed.SamplingSettings(rollout_max_response_len=64),
        )
        source = rollfeed.environment_source(
            "core/compare_max", level=1, seed=bench.arguments.seed, tokenizer=bench.model.tokenizer
        )
        engine = bench.engine([bench.arguments.server], weight_update="retract")
        proof, publishes, others = EngineProof(engine), [], {}
        async with rollfeed.open_rollouts(
            config, source=source, engine=engine, tokenizer=bench.model.tokenizer
        ) as rollouts:
            (held, *_) = weight_types(bench.model.checkpoint, precision=engine.precision, is_embedded=False)
            await self._publish(engine)
            batch = await rollouts.generate_batch()
            texts = choose_texts(batch, num_texts=NUM_TEXTS, num_tokens=NUM_TOKENS)
            again = [await self._scored(engine, texts) for _ in range(5)]
            base = Scores(policy_version=0, engine_N=again[0], publisher_N=self.score(texts, held))
            await proof.prove(self._probe(texts, held), policy_version=0)
            for number in range(1, NUM_PUBLISHES + 1):
                report = await asyncio.to_thread(self.trainer.train_step, batch)
                await self._publish(engine)
                await proof.prove(self._probe(texts, held), policy_version=number)
                publishes.append({**proof.metrics(), "step_seconds": report.seconds})
                if number in OTHER_WEIGHTS_AT:
                    others[str(number)] = await self._other_weights(engine, texts, held, base)
                batch = await rollouts.generate_batch()
        return {
            "held_as": held,
            "tokens": len(base.engine_N),
            "noise": base.noise,
            "noise_of_scoring_again": float(np.mean([np.abs(each - again[0]).mean() for each in again[1:]])),
            "publishes": publishes,
            "other_weights": others,
        }

    async def _publish(self, engine: ServerEngine, others: Mapping[str, torch.Tensor] | None = None) -> None:
        tensors = {**self.trainer.weights(), **(others or {})}
        await engine.apply(TensorUpdate(tensors, policy_version=engine.policy_version + 1))

    @staticmethod
    async def _scored(engine: ServerEngine, texts: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
        (logprobs_N,) = (await engine.score(texts)).values()
        return logprobs_N

    def _probe(self, texts: tuple[NDArray[np.int32], ...], held: str) -> WeightProbe:
        began = time.perf_counter()
        logprobs_N = self.score(texts, held)
        return WeightProbe(texts=texts, logprobs={held: logprobs_N}, seconds=time.perf_counter() - began)

    async def _other_weights(
        self, engine: ServerEngine, texts: Sequence[NDArray[np.int32]], held: str, base: Scores
    ) -> dict[str, Any]:
        published_N = self.score(texts, held)
        found = {}
        for name, others in self._cases().items():
            await self._publish(engine, others)
            scores = Scores(policy_version=1, engine_N=await self._scored(engine, texts), publisher_N=published_N)
            compared = compare(base, scores)
            found[name] = {
                "refused": compared.is_refuted,
                **{
                    key: float(f"{getattr(compared, key):.3g}")
                    for key in ("slope", "slope_error", "change", "residual")
                },
            }
        await self._publish(engine)
        return found

    def _cases(self) -> dict[str, Tensors]:
        now = self.trainer.weights()
        layer_of = {name: int(found[1]) for name in now if (found := re.search(r"layers\.(\d+)\.", name))}
        middle = (max(layer_of.values()) + 1) // 2
        matrix, next_one = MATRIX.format(middle), middle - 1
        twins = {
            name: name.replace(f"layers.{middle}.", f"layers.{next_one}.")
            for name, layer in layer_of.items()
            if layer == middle
        }
        return {
            "the published ones": {},
            "everything old": self.first,
            "old second half": {name: self.first[name] for name, layer in layer_of.items() if layer >= middle},
            "one old layer": {name: self.first[name] for name in twins},
            f"{matrix} times 1.01": {matrix: now[matrix] * 1.01},
            "two layers swapped": {
                **{name: now[twin] for name, twin in twins.items()},
                **{twin: now[name] for name, twin in twins.items()},
            },
        }

    async def versions(self) -> dict[str, Any]:
        """Return how far sampled log-probabilities are from the trainer's of each token's version and of others."""
        generator = torch.Generator(device=self.trainer.device).manual_seed(self.bench.arguments.seed)
        sets: list[Tensors] = [self.first]
        for _ in range(NUM_UPDATES):
            changed = {}
            for name, tensor in self.first.items():
                noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
                changed[name] = tensor * (1.0 + 0.03 * noise)
            sets.append(changed)
        found = {}
        for mode in ("abort", "retract", "in_place"):
            async with self.bench.engine([self.bench.arguments.server], weight_update=mode) as engine:
                first = engine.policy_version + 1
                await engine.apply(TensorUpdate(sets[0], policy_version=first))
                params = SamplingParams(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
                prompts = self.bench.prompts(NUM_REQUESTS)
                tasks = [
                    asyncio.create_task(engine.generate(prompt, params, request_id=f"{mode}{index}"))
                    for index, prompt in enumerate(prompts)
                ]
                seconds = []
                for number in range(1, NUM_UPDATES + 1):
                    await asyncio.sleep(SECONDS_BETWEEN)
                    began = time.perf_counter()
                    await engine.apply(TensorUpdate(sets[number], policy_version=first + number))
                    seconds.append(round(time.perf_counter() - began, 3))
                completions = await asyncio.gather(*tasks)
            found[mode] = {"update_seconds": seconds, **self._explained(completions, prompts, sets, first)}
        with torch.no_grad():
            self._load(self.first)
        return found

    def _load(self, tensors: Tensors) -> None:
        own = self.trainer.weights()
        for name, tensor in tensors.items():
            own[name].copy_(tensor.bfloat16())

    @torch.no_grad()
    def _explained(
        self, completions: Sequence[Completion], prompts: Sequence[NDArray[np.int32]], sets: list[Tensors], first: int
    ) -> dict[str, Any]:
        """Compare sampled log-probabilities with those of all versions: of whole spans, and of tokens at borders."""
        texts = [np.concatenate([prompt, each.token_ids]) for prompt, each in zip(prompts, completions, strict=True)]
        ends = np.cumsum([len(text) - 1 for text in texts])
        by_version = []
        for tensors in sets:
            self._load(tensors)
            by_version.append(np.split(self.score(texts, "bfloat16"), ends[:-1]))
        inside: dict[str, list[float]] = {"own": [], "other": []}
        borders: dict[str, list[float]] = {"new": [], "old": []}
        num_spans = []
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            num_spans.append(len(completion.version_spans))
            differences = np.array(
                [np.abs(scores[number][len(prompt) - 1 :] - completion.logprobs) for scores in by_version]
            )
            for index, span in enumerate(completion.version_spans):
                own = span.policy_version - first
                # Behind a border an update in place leaves keys and values of older weights.
                rows = differences[:, span.start + 1 : span.end]
                inside["own"] += rows[own].tolist()
                inside["other"] += np.delete(rows, own, axis=0).mean(axis=0).tolist()
                if index:
                    borders["new"].append(float(differences[own, span.start]))
                    borders["old"].append(
                        float(differences[completion.version_spans[index - 1].policy_version - first, span.start])
                    )
        return {
            "spans_a_request": {str(count): num_spans.count(count) for count in sorted(set(num_spans))},
            "tokens": len(inside["own"]),
            "mean_difference": {name: float(np.mean(values)) for name, values in inside.items()},
            "mean_difference_at_borders": {name: float(np.mean(values)) for name, values in borders.items() if values},
        }


async def train(bench: Bench, mode: str) -> dict[str, Any]:
    """Train five steps; asynchronously where weights change in place."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "train.toml", Path(folder) / "run"
        file.write_text(
            TRAIN.format(
                seed=bench.arguments.seed,
                checkpoint=bench.model.checkpoint,
                server=bench.arguments.server,
                rollout="async" if mode == "in_place" else "sync",
                update=mode,
            )
        )
        # The version is the number of batches: servers of other numbers are brought to 0 first.
        async with bench.engine([bench.arguments.server]) as engine:
            await engine.apply(FolderUpdate(bench.model.checkpoint, policy_version=0))
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollfeed", "train", str(file), "--out", str(out)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        seconds = time.perf_counter() - began
        if process.returncode:
            return {"exit_code": process.returncode, "output": output.decode(errors="replace")[-2000:]}
        steps = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "exit_code": 0,
        "seconds": round(seconds, 1),
        "mismatch_abs": [step["train/mismatch_abs"] for step in steps],
        "train_seconds": [round(step["seconds"], 2) for step in steps],
        "by_step": {
            name: [line.get(name) for line in metrics]
            for name in sorted({name for line in metrics for name in line if "proof" in name or "perf/" in name})
        },
    }
