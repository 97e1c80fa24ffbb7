"""What a pass of training takes on a GPU: the head in chunks beside whole logits, and what saves memory or time.

The model has Qwen3-1.7B's shape and random weights; a micro-batch has 8,192 trained tokens in rows of 2,048. Each case
is measured over some passes, forward and backward, with gradients that add up, in the same process::

    python bench/gpu/train_head.py --output bench/gpu/train_head.json

``--device cpu`` tries everything with a small model: no memory, and times that mean nothing. A share of the bf16 peak
counts the products of weights and of causal attention once forward and twice backward, and nothing that is computed
again.

Axes: T trained tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sglang import machine
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rollfeed.config.optimizer import OptimizerSettings
from rollfeed.config.train import LossSettings, TrainSettings
from rollfeed.model_files.heads import Head, HeadShape
from rollfeed.model_files.trees import attend_in_blocks
from rollfeed.training.model import Policy, Scored, hold_linear_layers_as_computed, prepare_passes
from rollfeed.training.objective import Tally, TokenArrays, micro_batch_loss
from rollfeed.training.optimizer import Optimizer
from rollfeed.training.packing import MicroBatch, TrainSequence, pack_sequences
from rollfeed.training.scoring import ChunkSizes, score_tokens
from weights import SHAPE

PEAK = 989e12
"""Operations a second of an H200 in bf16, without sparsity, by its data sheet."""
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SIZES = {
    "nothing kept, 2^27": ChunkSizes(1 << 27, 1 << 27, 0),
    "nothing kept, 2^28": ChunkSizes(1 << 28, 1 << 28, 0),
    "nothing kept, 2^29": ChunkSizes(1 << 29, 1 << 29, 0),
    "2^28 kept, 2^28": ChunkSizes(1 << 28, 1 << 28, 1 << 28),
    "2^30 kept, 2^28": ChunkSizes(1 << 28, 1 << 28, 1 << 30),
}
BEFORE = ChunkSizes(1 << 22, 1 << 22, 0)
"""Logits that were exponentiated at a time."""


class WholeLogits(Policy):
    """A policy as it was before: the model's own logits of all trained tokens, in the type of its passes."""

    def score(self, micro_batch: MicroBatch, *, temperature: float | None = None, exact: bool = False) -> Scored:
        columns_K = torch.from_numpy(np.unique(micro_batch.columns_T)).to(self.device)
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            logits = self._forward(micro_batch, logits_to_keep=columns_K).logits
        # Every row has the same trained places, so that nothing is copied.
        logits_TV = logits.reshape(-1, logits.shape[-1])
        targets_T = torch.from_numpy(micro_batch.targets_T).to(self.device)
        return Scored(*score_tokens(logits_TV, target_T=targets_T, temperature=1.0, sizes=BEFORE))


class Bench:
    """One model and what is measured of it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.on_gpu = self.device.type == "cuda"
        shape = {
            name: value for name, value in SHAPE.items() if name not in ("architectures", "model_type", "torch_dtype")
        }
        shape |= {} if self.on_gpu else {**SMALL, "num_key_value_heads": 2, "vocab_size": 1500}
        config = transformers.Qwen3Config(**shape)
        torch.manual_seed(arguments.seed)
        with self.device:
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.tokens, self.row = (8192, 2048) if self.on_gpu else (64, 16)
        self.micro_batch = self.rows(self.tokens, self.row)
        self.found: dict[str, Any] = {}

    def rows(self, num_tokens: int, length: int) -> MicroBatch:
        """Return rows of one length, all behind the first token trained."""
        generator = np.random.default_rng(self.arguments.seed)
        vocabulary = self.model.config.vocab_size
        sequences = [
            TrainSequence.of_tokens(
                generator.integers(0, vocabulary, length + 1).astype(np.int32), prompt_length=1, number=number
            )
            for number in range(num_tokens // length)
        ]
        return self.packed(sequences, num_tokens)

    def packed(self, sequences: list[TrainSequence], num_tokens: int, longest_tree: int = 0) -> MicroBatch:
        weights = [np.full(len(each.mask_T), 1e-4, np.float32) for each in sequences]
        [packed] = pack_sequences(
            sequences,
            weights,
            micro_batch_tokens=num_tokens,
            share_prompts=longest_tree > 0,
            longest_tree=longest_tree,
        )
        return packed

    def policy(self, kind: type[Policy] = Policy, **options: Any) -> Policy:
        return kind(self.model, temperature=1.0, autocast=torch.bfloat16, **options)

    def step(self, policy: Policy, micro_batch: MicroBatch) -> None:
        arrays = TokenArrays.of(micro_batch, self.device)
        loss = micro_batch_loss(
            policy.score(micro_batch),
            arrays,
            settings=LossSettings(),
            start_logprobs_T=None,
            reference_logprobs_T=None,
            tally=Tally(),
        )
        loss.backward()

    def operations(self, num_tokens: int, length: int) -> float:
        """Return the operations of a pass and its way back."""
        config = self.model.config
        embedded = config.vocab_size * config.hidden_size
        body = sum(each.numel() for each in self.model.parameters()) - embedded
        attention = config.num_hidden_layers * 2 * length * config.num_attention_heads * config.head_dim
        return 3.0 * num_tokens * (2 * (body + embedded) + attention)

    def measure(self, make: Callable[[], None], *, repeats: int | None = None) -> dict[str, Any]:
        """Return seconds, and the memory at its highest beside what was there before."""
        make()
        self.wait()
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(repeats or (self.arguments.repeats if self.on_gpu else 1)):
            began = time.perf_counter()
            make()
            self.wait()
            seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() - before if self.on_gpu else 0
        return {"seconds": statistics.median(seconds), "all_seconds": seconds, "peak_gib": round(peak / 2**30, 3)}

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def case(self, name: str, policy: Policy, *, num_tokens: int = 0, length: int = 0) -> None:
        """Measure passes with a policy."""
        num_tokens, length = num_tokens or self.tokens, length or self.row
        micro_batch = self.micro_batch if length == self.row else self.rows(num_tokens, length)

        def measured() -> dict[str, Any]:
            figures = self.measure(lambda: self.step(policy, micro_batch))
            seconds = figures["seconds"]
            share = self.operations(num_tokens, length) / seconds / PEAK
            return {**figures, "tokens_per_second": round(num_tokens / seconds), "share_of_peak": round(share, 4)}

        self.note(f"pass: {name}", measured)

    def note(self, name: str, make: Callable[[], Any]) -> None:
        """Keep what was found, or why there is nothing, and go on."""
        began = time.perf_counter()
        try:
            self.found[name] = make()
        except Exception as error:
            traceback.print_exc()
            self.found[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        if self.on_gpu:
            torch.cuda.empty_cache()
        seconds = time.perf_counter() - began
        print(f"{name} ({seconds:.1f} s): {json.dumps(self.found[name])[:600]}", file=sys.stderr, flush=True)
        result = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "found": self.found}
        result |= {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
        self.arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    def heads(self) -> None:
        """Measure the head alone, whole and in chunks, by the number of tokens."""
        weight = self.model.get_output_embeddings().weight
        for num_tokens in (1024, 4096, 8192, 16384) if self.on_gpu else (16, 64):
            hidden = torch.randn(num_tokens, weight.shape[1], device=self.device, requires_grad=True)
            targets = torch.randint(weight.shape[0], (num_tokens,), device=self.device)

            def whole(hidden: Tensor = hidden, targets: Tensor = targets) -> None:
                with torch.autocast(self.device.type, dtype=torch.bfloat16):
                    logits = torch.nn.functional.linear(hidden, weight)
                score_tokens(logits, target_T=targets, temperature=1.0, sizes=BEFORE)[0].sum().backward()

            def chunked(
                sizes: ChunkSizes, dtype: torch.dtype, hidden: Tensor = hidden, targets: Tensor = targets
            ) -> None:
                head = Head(weight, None, HeadShape())
                scored = score_tokens(hidden, target_T=targets, temperature=1.0, head=head, dtype=dtype, sizes=sizes)
                scored[0].sum().backward()

            cases = {"whole": whole}
            for name, sizes in SIZES.items():
                cases[name] = lambda sizes=sizes: chunked(sizes, torch.bfloat16)
            cases["fp32, 2^28"] = lambda: chunked(SIZES["nothing kept, 2^28"], torch.float32)
            self.note(
                f"head: {num_tokens} tokens", lambda cases=cases: {name: self.measure(f) for name, f in cases.items()}
            )

    def waits(self, name: str, policy: Policy, micro_batch: MicroBatch) -> None:
        """Count where the host waits for the device in a pass."""

        def counted() -> dict[str, Any]:
            self.step(policy, micro_batch)
            self.wait()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    self.step(policy, micro_batch)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            places = Counter(f"{Path(each.filename).name}:{each.lineno}" for each in caught)
            return {"waits": len(caught), "at": dict(places.most_common())}

        if self.on_gpu:
            self.note(f"waits: {name}", counted)

    def operators(self, name: str, policy: Policy) -> None:
        """Tell which kernels take the time of a pass."""

        def profiled() -> dict[str, Any]:
            self.step(policy, self.micro_batch)
            self.wait()
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
            with profile(activities=activities) as profiler:
                self.step(policy, self.micro_batch)
                self.wait()
            kind = torch.autograd.DeviceType.CUDA if self.on_gpu else torch.autograd.DeviceType.CPU
            kernels = [each for each in profiler.key_averages() if each.device_type == kind]
            taken = {
                each.key: (each.self_device_time_total if self.on_gpu else each.self_cpu_time_total) for each in kernels
            }
            total = sum(taken.values()) or 1.0
            top = sorted(kernels, key=lambda each: -taken[each.key])[:24]
            rows = [[each.key[:110], round(taken[each.key] / 1000, 2), each.count] for each in top]
            return {"total_ms": round(total / 1000, 2), "top": rows}

        self.note(f"kernels: {name}", profiled)

    def updates(self) -> None:
        """Measure an update with its moments on the GPU and in the CPU's memory."""
        for offload in (False, True):

            def updated(offload: bool = offload) -> dict[str, Any]:
                settings = OptimizerSettings(learning_rate=1e-9, offload=offload)
                optimizer = Optimizer(self.model, settings=settings, num_updates=10)
                before = torch.cuda.memory_allocated() if self.on_gpu else 0

                def update() -> None:
                    for parameter in self.model.parameters():
                        if parameter.grad is None:
                            parameter.grad = torch.full_like(parameter, 1e-4)
                    optimizer.step()

                figures = self.measure(update, repeats=3)
                held = (torch.cuda.memory_allocated() - before) if self.on_gpu else 0
                return {**figures, "held_gib": round(held / 2**30, 3)}

            self.note(f"update: moments {'offloaded' if offload else 'on the GPU'}", updated)

    def reference(self) -> None:
        """Tell what a reference takes, and whether it says the same when its linear layers are held in bf16."""

        def held() -> dict[str, Any]:
            reference = Policy(
                copy.deepcopy(self.model).requires_grad_(False), temperature=1.0, autocast=torch.bfloat16
            )
            before = reference.score_each([self.micro_batch])[0].logprobs_T
            size = sum(each.nbytes for each in reference.model.parameters())
            hold_linear_layers_as_computed(reference)
            same = torch.equal(reference.score_each([self.micro_batch])[0].logprobs_T, before)
            rest = sum(each.nbytes for each in reference.model.parameters())
            return {"gib": round(size / 2**30, 3), "gib_as_computed": round(rest / 2**30, 3), "same_to_the_bit": same}

        self.note("reference", held)

    def differences(self) -> None:
        """Compare log-probabilities with a pass in fp32."""

        def differ() -> dict[str, Any]:
            micro_batch = self.rows(*((2048, 2048) if self.on_gpu else (16, 16)))
            exact = Policy(self.model, temperature=1.0).score_each([micro_batch], exact=True)[0].logprobs_T.double()
            policies = {"whole": self.policy(WholeLogits), "chunks": self.policy()}
            policies["chunks, fp32 head"] = self.policy(head_dtype=torch.float32)
            found = {}
            for name, policy in policies.items():
                ratio = policy.score_each([micro_batch])[0].logprobs_T.double() - exact
                k3 = float((torch.expm1(ratio) - ratio).mean())
                found[name] = {"mean_absolute": float(ratio.abs().mean()), "k3": k3}
            return found

        self.note("difference to fp32", differ)

    def shared_prompts(self) -> None:
        """Measure eight responses to one prompt, alone and in one row that is attended to block by block."""
        prompt_length, length = (2048, 1024) if self.on_gpu else (16, 8)
        generator = np.random.default_rng(self.arguments.seed)
        vocabulary = self.model.config.vocab_size
        prompt = generator.integers(0, vocabulary, prompt_length)
        sequences = []
        for number in range(8):
            ids = np.concatenate([prompt, generator.integers(0, vocabulary, length)]).astype(np.int32)
            sequences.append(TrainSequence.of_tokens(ids, prompt_length=prompt_length, number=number, family=0))
        alone = self.packed(sequences, 8 * (prompt_length + length))
        shared = self.packed(sequences, prompt_length + 8 * length, longest_tree=prompt_length + 8 * length)
        found: dict[str, dict[int, Tensor]] = {}
        for name, micro_batch in (("alone", alone), ("shared", shared)):
            policy = self.policy()
            policy.attends_in_blocks = name == "shared" and attend_in_blocks(self.model)
            self.note(
                f"prompts: {name}",
                lambda micro_batch=micro_batch, policy=policy: {
                    **self.measure(lambda: self.step(policy, micro_batch)),
                    "places": micro_batch.token_ids_BL.size,
                    "in_blocks": policy.attends_in_blocks,
                },
            )
            self.waits(f"prompts {name}", policy, micro_batch)
            scored = policy.score_each([micro_batch])
            found[name] = {number: each.logprobs_T for number, each in scored.items()}
        differences = [(found["alone"][number] - found["shared"][number]).abs() for number in range(8)]
        self.note("prompts: difference", lambda: {"mean_absolute": float(torch.cat(differences).mean())})


def main() -> None:
    """Read the arguments and measure one thing after the other; the file is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a try")
    parser.add_argument("--repeats", type=int, default=5, help="passes of each case (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    bench = Bench(parser.parse_args())
    bench.case("whole logits", bench.policy(WholeLogits))
    bench.case("chunks", bench.policy())
    bench.case("chunks, fp32 head", bench.policy(head_dtype=torch.float32))
    bench.operators("whole logits", bench.policy(WholeLogits))
    bench.operators("chunks", bench.policy())
    bench.waits("rows", bench.policy(), bench.micro_batch)
    bench.shared_prompts()
    bench.heads()
    bench.differences()
    bench.reference()
    bench.updates()
    compiled = bench.policy()
    prepare_passes(compiled, TrainSettings(compile=bench.on_gpu))
    bench.case("chunks, compiled", compiled)
    bench.operators("chunks, compiled", compiled)
    bench.case("chunks, compiled, rows of another length", compiled, num_tokens=bench.tokens, length=bench.row // 2)
    for layer in bench.model.model.layers:
        layer._compiled_call_impl = None
    kept = bench.policy()
    prepare_passes(kept, TrainSettings(activation_checkpointing=True))
    bench.case("chunks, checkpointing", kept)
    bench.case("chunks, checkpointing, 32k tokens", kept, num_tokens=4 * bench.tokens, length=4 * bench.row)
    kept.offloads = True
    bench.case("chunks, checkpointing, offload", kept)
    bench.case("chunks, checkpointing, offload, 32k tokens", kept, num_tokens=4 * bench.tokens, length=4 * bench.row)


if __name__ == "__main__":
    main()
