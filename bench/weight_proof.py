"""What the proof after a publish finds on SmolLM2-135M, in each precision, and whether it accuses one that follows.

Two series of weights are published to three engines: fp32 and int8 are the embedded one; bf16 is a forward pass in
which weights and the output of every module are rounded. The checkpoint is rounded to bf16 first, as most are.

- ``trained``: GRPO at a learning rate of 1e-5 on answers of ``core/compare_max``, rewarded for the letter e. At some
  versions each engine is also given weights that are not the published ones: kept from the beginning, whole or in part,
  one matrix changed by 1 %, two layers swapped.
- ``walk``: every weight goes 1e-5 at a time in a direction that lasts for 25 publishes, and as much at random; after
  three quarters of the publishes ten times as much. Nothing is wrong there.

What engines and publisher say of the texts is kept in ``--raw``; with ``--parts`` and nothing behind it only the tables
are made again::

    python bench/weight_proof.py --raw scores --output bench/weight_proof.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

import rollfeed
from rollfeed.benchmarks.machine import machine
from rollfeed.config.optimizer import OptimizerSettings
from rollfeed.config.train import TrainSettings
from rollfeed.engine.backends.native.places import quantised
from rollfeed.engine.local import create_local_engine
from rollfeed.errors import EngineProtocolError
from rollfeed.testing import ScriptedEngine
from rollfeed.training.model import Policy, load_policy_model
from rollfeed.training.probe import choose_texts, rounding_of, score_texts
from rollfeed.training.trainer import Trainer
from rollfeed.types import PUBLISHED, TensorUpdate, WeightProbe
from rollfeed.weights import EngineProof, Scores, compare, write_checkpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HELD = {"fp32": PUBLISHED, "bf16": "bfloat16", "int8": "int8"}
LEARNING_RATE = 1e-5
LAYER = "model.layers.{}.{}.weight"
MATRICES = ((15, "mlp.down_proj"), (29, "self_attn.o_proj"), (10, "mlp.gate_proj"))
Array = NDArray[np.float64]


class RoundedEngine:
    """bf16: fp32 kernels, with weights and the output of every module rounded."""

    def __init__(self, folder: Path) -> None:
        self.model = load_policy_model(folder, device=torch.device("cpu"))
        for module in self.model.modules():
            if not type(module).__name__.endswith(("RotaryEmbedding", "ForCausalLM")):
                module.register_forward_hook(self._round)

    @staticmethod
    def _round(module: Any, inputs: Any, output: Any) -> Any:
        is_rounded = isinstance(output, torch.Tensor) and output.is_floating_point()
        return output.bfloat16().float() if is_rounded else output

    async def apply(self, update: TensorUpdate) -> None:
        own = self.model.state_dict()
        for name, tensor in update.tensors.items():
            own[name].copy_(tensor.bfloat16())

    async def score(self, texts: Any) -> Mapping[str, Array]:
        policy = Policy(self.model, temperature=1.0)
        return {"bf16": score_texts(policy, texts, rounding=None, micro_batch_tokens=1024)}


class Series:
    """Publishes weights to all engines, and keeps what is said of the texts."""

    def __init__(self, arguments: argparse.Namespace, name: str, work: Path) -> None:
        self.model = rollfeed.load_model(arguments.checkpoint) if arguments.checkpoint else rollfeed.load_model()
        self.file = arguments.raw / f"{name}.npz"
        self.kept: dict[str, Array] = {}
        self.tied, self.untied = work / "tied", work / "untied"
        tensors = load_file(self.model.checkpoint / "model.safetensors")
        tensors = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
        write_checkpoint(tensors, self.tied, checkpoint=self.model.checkpoint)
        # A head that differs from the embeddings is one that can stay behind.
        write_checkpoint({**tensors, HEAD: tensors[EMBEDDING] + 1e-3}, self.untied, checkpoint=self.model.checkpoint)
        config = json.loads((self.untied / "config.json").read_text())
        (self.untied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
        settings = TrainSettings(
            optimizer=OptimizerSettings(learning_rate=LEARNING_RATE), threads=arguments.threads, micro_batch_tokens=768
        )
        self.trainer = Trainer(
            self.tied, settings=settings, temperature=1.0, num_batches=1000, max_response_length=arguments.response
        )
        self.engines: dict[str, Any] = {
            precision: create_local_engine(
                checkpoint=self.untied,
                tokenizer=self.model.tokenizer,
                threads=arguments.threads,
                num_slots=16,
                context_length=256,
                deterministic=False,
                precision=precision,
            )
            for precision in ("fp32", "int8")
        }
        self.engines["bf16"] = RoundedEngine(self.untied)
        self.first = self.weights(copied=True)
        self.num_updates = 0

    def weights(self, *, copied: bool = False) -> dict[str, torch.Tensor]:
        """Return the trainer's, with the head under its own name."""
        found = self.trainer.weights()
        found = {name: tensor.clone() for name, tensor in found.items()} if copied else dict(found)
        return {**found, HEAD: found[EMBEDDING]}

    async def note(self, version: int, cases: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Score the texts on both sides; on that of the engines with the weights of each case in place of those."""
        for precision, held in HELD.items():
            began = time.perf_counter()
            scored = score_texts(
                self.trainer.policy, self.texts, rounding=rounding_of(held, to_int8=quantised), micro_batch_tokens=1024
            )
            self.kept[f"{version}/publisher/{precision}"] = scored
            now, before = self.weights(), self.weights()
            for case, changed in {"": {}, **cases}.items():
                self.num_updates += 1
                engine = self.engines[precision]
                await engine.apply(TensorUpdate({**before, **changed}, policy_version=self.num_updates))
                (self.kept[f"{version}/{precision}/{case}"],) = (await engine.score(self.texts)).values()
                before = {name: now[name] for name in changed}
            print(f"version {version} {precision}: {time.perf_counter() - began:.1f} s", flush=True)
        np.savez(self.file, texts=np.array([len(text) for text in self.texts]), **self.kept)

    def cases(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return weights that are not those that are published."""
        now = self.weights()
        layer_of = {name: int(name.split(".")[2]) if ".layers." in name else -1 for name in now}
        found = {
            "everything old": self.first,
            "old head": {HEAD: self.first[HEAD]},
            "old layers 15 to 29": {name: self.first[name] for name in now if layer_of[name] >= 15},
            "old layer 20": {name: self.first[name] for name in now if layer_of[name] == 20},
        }
        for number, part in MATRICES:
            name = LAYER.format(number, part)
            found[f"{name} times 1.01"] = {name: now[name] * 1.01}
        for one, other in ((3, 4), (20, 21)):
            pairs = {name: name.replace(f"layers.{one}.", f"layers.{other}.") for name in now if layer_of[name] == one}
            swapped = {name: now[twin] for name, twin in pairs.items()} | {t: now[n] for n, t in pairs.items()}
            found[f"layers {one} and {other} swapped"] = swapped
        return found


async def trained(series: Series, arguments: argparse.Namespace) -> None:
    """Train and publish; the engine that samples is the fp32 one."""

    def letters(sample: Any, prompt: Any) -> float:
        return sample.response.count("e") / max(1, len(sample.response))

    tokenizer, engine = series.model.tokenizer, series.engines["fp32"]
    config = rollfeed.RolloutConfig(
        seed=arguments.seed,
        rollout=rollfeed.RolloutSettings(rollout_batch_size=arguments.groups, n_samples_per_prompt=2),
        reward=rollfeed.RewardSettings(override_environments=True),
        plugins=rollfeed.PluginSettings(reward=letters),
        sampling=rollfeed.SamplingSettings(rollout_max_response_len=arguments.response),
    )
    source = rollfeed.environment_source("core/compare_max", level=1, seed=arguments.seed, tokenizer=tokenizer)
    async with (
        series.engines["int8"],
        rollfeed.open_rollouts(config, source=source, engine=engine, tokenizer=tokenizer) as rollouts,
    ):
        for version in range(1, max(arguments.versions) + 1):
            series.num_updates += 1
            await engine.apply(TensorUpdate(series.weights(), policy_version=series.num_updates))
            batch = await rollouts.generate_batch()
            if version == 1:
                series.texts = choose_texts(batch, num_texts=12, num_tokens=48)
                await series.note(0, {})
            report = await asyncio.to_thread(series.trainer.train_step, batch)
            print(f"step {version}: {report.seconds:.0f} s", flush=True)
            if version in arguments.versions:
                await series.note(version, series.cases())


async def walk(series: Series, arguments: argparse.Namespace) -> None:
    """Publish weights that wander."""
    tokenizer = series.model.tokenizer
    source = rollfeed.environment_source("core/compare_max", level=1, seed=arguments.seed, tokenizer=tokenizer)
    series.texts = tuple(prompt.token_ids[-arguments.walk_tokens :] for prompt in await source.draw(12))
    pool = torch.randn(1 << 26, generator=torch.Generator().manual_seed(arguments.seed))
    random = np.random.default_rng(arguments.seed)
    lasting: dict[str, int] = {}
    async with series.engines["fp32"], series.engines["int8"]:
        await series.note(0, {})
        for version in range(1, arguments.publishes + 1):
            rate = LEARNING_RATE if version <= arguments.publishes * 3 // 4 else 10 * LEARNING_RATE
            for name, parameter in series.trainer.policy.model.named_parameters():
                size = parameter.numel()
                starts = random.integers(0, len(pool) - size, 2)
                if version % 25 == 1:
                    lasting[name] = int(starts[0])
                for start in (lasting[name], int(starts[1])):
                    parameter.data.view(-1).add_(pool[start : start + size], alpha=0.7 * rate)
            await series.note(version, {})


class Repeating(ScriptedEngine):
    """Says what an engine has said."""

    says: Array

    async def score(self, texts: Any) -> Mapping[str, Array]:
        return {"engine": self.says}


async def refusal(raw: Mapping[str, Array], precision: str, steps: list[tuple[int, str]]) -> int | None:
    """Return the version at which the proof fails, over (version, case); None where it does not."""
    engine, texts = Repeating(), tuple(np.arange(length) for length in raw["texts"].tolist())
    engine.precision = precision
    proof = EngineProof(engine)
    for version, case in steps:
        engine.says = raw[f"{version}/{precision}/{case}"]
        probe = WeightProbe(texts=texts, logprobs={HELD[precision]: raw[f"{version}/publisher/{precision}"]})
        try:
            await proof.prove(probe, policy_version=version)
        except EngineProtocolError:
            return version
    return None


def scores(raw: Mapping[str, Array], precision: str, version: int, case: str = "") -> Scores:
    return Scores(
        policy_version=version,
        engine_N=raw[f"{version}/{precision}/{case}"],
        publisher_N=raw[f"{version}/publisher/{precision}"],
    )


def smallest(found: Callable[[float, np.random.Generator], bool], seed: int) -> float | None:
    """Return the smallest size that is found 298 times of 300, which says 0.99."""
    for size in np.geomspace(1e-7, 3.0, 76):
        random = np.random.default_rng(seed)
        if sum(found(float(size), random) for _ in range(300)) >= 298:
            return float(f"{size:.2g}")
    return None


def smallest_changes(raw: Mapping[str, Array], precision: str, versions: list[int], seed: int) -> dict[str, Any]:
    """Return how large changes have to be, in nats a token; noise is what engines said beside what was expected."""
    base = scores(raw, precision, 0)
    noises = [
        scores(raw, precision, version).engine_N - scores(raw, precision, version).publisher_N for version in versions
    ]
    change_N = scores(raw, precision, versions[-1]).publisher_N - base.publisher_N
    change_N = change_N / np.mean(np.abs(change_N))

    def now(published_N: Array, taken_N: Array, random: np.random.Generator) -> Scores:
        noise_N = noises[random.integers(len(noises))] * random.choice([-1.0, 1.0], len(change_N))
        engine_N = base.publisher_N + taken_N + noise_N
        return Scores(policy_version=1, engine_N=engine_N, publisher_N=base.publisher_N + published_N)

    def kept(size: float, random: np.random.Generator) -> bool:
        return compare(base, now(size * change_N, 0.0 * change_N, random)).is_refuted

    def other(size: float, random: np.random.Generator) -> bool:
        other_N = random.laplace(0.0, size, len(change_N))
        return compare(base, now(0.0 * change_N, other_N, random)).is_refuted

    return {"kept_change": smallest(kept, seed), "other_change": smallest(other, seed)}


def tables(arguments: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if (arguments.raw / "trained.npz").exists():
        raw = dict(np.load(arguments.raw / "trained.npz"))
        versions = [version for version in arguments.versions if f"{version}/publisher/fp32" in raw]
        cases = sorted({key.split("/", 2)[2] for key in raw if key.startswith(f"{versions[0]}/fp32/")} - {""})
        for precision in HELD:
            compared = {
                str(version): compare(scores(raw, precision, 0), scores(raw, precision, version))
                for version in versions
            }
            result[precision] = {
                "noise": float(f"{compared[str(versions[0])].noise:.3g}"),
                "by_publishes": {
                    version: {
                        name: float(f"{getattr(each, name):.3g}")
                        for name in ("slope", "slope_error", "change", "residual")
                    }
                    for version, each in compared.items()
                },
                "refused_though_right": asyncio.run(refusal(raw, precision, [(v, "") for v in [0, *versions]])),
                "found_after_publishes": {
                    case: [v for v in versions if asyncio.run(refusal(raw, precision, [(0, ""), (v, case)])) == v]
                    for case in cases
                },
                "smallest_found_with_0.99": smallest_changes(raw, precision, versions, arguments.seed),
            }
    if (arguments.raw / "walk.npz").exists():
        raw = dict(np.load(arguments.raw / "walk.npz"))
        last = max(int(key.split("/")[0]) for key in raw if key.endswith("/int8/"))
        for precision in HELD:
            told = [compare(scores(raw, precision, 0), scores(raw, precision, v)) for v in range(1, last + 1)]
            refused = asyncio.run(refusal(raw, precision, [(version, "") for version in range(last + 1)]))
            result.setdefault(precision, {})["walk"] = {
                "publishes": last,
                "tokens": told[0].num_tokens,
                "false_alarms": 0 if refused is None else f"at {refused}",
                "largest_residual_to_noise": round(max(each.residual / each.noise for each in told), 2),
                "change_at_the_end": float(f"{told[-1].change:.3g}"),
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--raw", type=Path, required=True, help="a folder")
    parser.add_argument("--checkpoint", help="another one than SmolLM2-135M, for the walk")
    parser.add_argument("--parts", nargs="*", default=["trained", "walk"])
    parser.add_argument("--versions", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--response", type=int, default=20)
    parser.add_argument("--publishes", type=int, default=200)
    parser.add_argument("--walk-tokens", type=int, default=33)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.raw.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    for name in arguments.parts:
        with tempfile.TemporaryDirectory() as work:
            asyncio.run({"trained": trained, "walk": walk}[name](Series(arguments, name, Path(work)), arguments))
    record = {"command": shlex.join(["python", *sys.argv]), "machine": machine(), **tables(arguments)}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
