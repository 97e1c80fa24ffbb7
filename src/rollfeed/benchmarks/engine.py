"""The embedded engine beside transformers' ``generate()``: same model, prompts, lengths and threads, in turn.

The reference gets all prompts in one padded batch with ``num_return_sequences`` and its cache, so that
it decodes as many rows at once as ours, with whichever number of threads up to ours is faster. Both
sample at temperature 1 and make exactly as many tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.app import Model
from rollfeed.engine.backends.native.library import NativeUnavailableError, load_library
from rollfeed.protocols import Engine
from rollfeed.types import Completion, SamplingParams, TensorUpdate

QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a dog that finds a key.",
    "How do I cook rice? Explain every step.",
    "Which number is the largest: 37, 73 or 61? Explain.",
)

_BYTES_A_WEIGHT = {"fp32": 4.0, "int8": 1.125}
"""In 8 bits, two numbers of 32 bits come with every group of 64 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorkload:
    """The prompts, lengths and repetitions that both engines do."""

    num_groups: int = 4
    n_samples_per_prompt: int = 8
    new_tokens: int = 128
    repetitions: int = 3
    seed: int = 0


def bench_engine(
    model: Model, *, threads: Sequence[int], workload: EngineWorkload, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure and return JSON values; takes minutes.

    The figures at the top are those of the most threads: of float32, and ``ratio_int8`` and ``kl_int8`` of the 8-bit
    mode (None where the native kernels are not available).
    """
    reference = Reference(model, workload)
    results = [_measure(model, reference, count, workload, progress) for count in sorted(threads)]
    exact, int8 = results[-1]["by_precision"]["fp32"], results[-1]["by_precision"].get("int8", {})
    of_exact = ("ratio", "max_logprob_difference", "greedy_outputs_identical")
    return {
        "workload": asdict(workload),
        "questions": QUESTIONS[: workload.num_groups],
        "threads": results[-1]["threads"],
        **{name: exact[name] for name in (*of_exact, "step_milliseconds", "traffic_floor_milliseconds")},
        "ratio_int8": int8.get("ratio"),
        "kl_int8": int8.get("kl"),
        "by_threads": results,
    }


def _measure(
    model: Model, reference: Reference, threads: int, workload: EngineWorkload, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Time ours in each precision and the reference in turn, ``repetitions`` times, then compare the tokens."""
    prompts = prompts_of(model, workload)
    ours = {precision: _Ours(model, threads, precision, prompts, workload) for precision in _precisions()}
    theirs: dict[int, list[float]] = {count: [] for count in range(1, threads + 1) if threads % count == 0}
    for repetition in range(workload.repetitions):
        for precision, measured in ours.items():
            seconds = measured.generate(repetition)
            progress(f"{threads} threads, {precision}: {seconds:.1f} s")
        for count, times in theirs.items():
            times.append(reference.seconds(prompts, count))
            progress(f"{count} threads, transformers: {times[-1]:.1f} s")
    best = [min(times) for times in zip(*theirs.values(), strict=True)]
    num_tokens = workload.num_groups * workload.n_samples_per_prompt * workload.new_tokens
    return {
        "threads": threads,
        "reference_tokens_per_second": {count: num_tokens / median(times) for count, times in theirs.items()},
        "by_precision": {precision: measured.result(reference, best) for precision, measured in ours.items()},
    }


def _precisions() -> list[str]:
    try:
        load_library()
    except NativeUnavailableError:
        return ["fp32"]
    return ["fp32", "int8"]


class _Ours:
    """Our engine in one precision."""

    def __init__(
        self, model: Model, threads: int, precision: str, prompts: Sequence[NDArray[np.int32]], workload: EngineWorkload
    ) -> None:
        self._model = model
        self._threads = threads
        self._precision = precision
        self._prompts = prompts
        self._workload = workload
        self._seconds: list[float] = []
        self._milliseconds: list[Mapping[str, float]] = []

    def generate(self, repetition: int) -> float:
        """Start an engine, do the workload once, and return how long that took without the start."""
        # Here, because it brings torch, which the command line does without.
        from rollfeed.engine.local import create_local_engine

        async def main() -> None:
            engine = create_local_engine(
                checkpoint=self._model.checkpoint,
                tokenizer=self._model.tokenizer,
                threads=self._threads,
                num_slots=self._workload.num_groups * self._workload.n_samples_per_prompt,
                context_length=512,
                deterministic=False,
                precision=self._precision,
            )
            async with engine:
                await _generate(engine, self._prompts, self._workload, seed=0, new_tokens=2)
                await engine.apply(TensorUpdate({}, policy_version=1))  # forgets the prompts' keys and values
                await engine.take_step_milliseconds()
                started = time.perf_counter()
                self.completions = await _generate(
                    engine, self._prompts, self._workload, seed=repetition, new_tokens=None
                )
                self._seconds.append(time.perf_counter() - started)
                self._milliseconds.append(await engine.take_step_milliseconds())
                if repetition == 0:
                    self._greedy = await _greedy(engine, self._prompts)

        asyncio.run(main())
        return self._seconds[-1]

    def result(self, reference: Reference, reference_seconds: Sequence[float]) -> dict[str, Any]:
        """Compare with the reference's times and its probabilities.

        ``ratio`` is of tokens per second to the reference's best, ``traffic_floor_milliseconds`` what reading the
        weights once takes; ``kl`` is an estimate of KL(ours || reference), the mean over the sampled tokens of our
        logprob minus the reference's.
        """
        workload = self._workload
        differences = reference.logprob_differences(self._prompts, self.completions)
        num_tokens = workload.num_groups * workload.n_samples_per_prompt * workload.new_tokens
        num_bytes = reference.num_weights * _BYTES_A_WEIGHT[self._precision]
        taken = self._milliseconds
        return {
            "ratio": median(their / our for our, their in zip(self._seconds, reference_seconds, strict=True)),
            "tokens_per_second": num_tokens / median(self._seconds),
            "step_milliseconds": {part: round(median(each[part] for each in taken), 3) for part in taken[0]},
            "traffic_floor_milliseconds": reference.seconds_to_read(num_bytes, self._threads) * 1e3,
            "max_logprob_difference": float(np.abs(differences).max()),
            "kl": float(differences.mean()),
            "kl_standard_error": float(differences.std() / np.sqrt(len(differences))),
            "greedy_outputs_identical": [c.token_ids.tolist() for c in self._greedy] == reference.greedy(self._prompts),
        }


def prompts_of(model: Model, workload: EngineWorkload) -> list[NDArray[np.int32]]:
    """Return the tokens of the workload's questions, as the model is asked."""
    tokenizer = model.tokenizer
    texts = [tokenizer.render_chat([{"role": "user", "content": q}]) for q in QUESTIONS[: workload.num_groups]]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


async def _generate(
    engine: Engine, prompts: Sequence[NDArray[np.int32]], workload: EngineWorkload, *, seed: int, new_tokens: int | None
) -> list[Completion]:
    length = new_tokens or workload.new_tokens
    members = range(workload.n_samples_per_prompt)
    return await asyncio.gather(
        *(
            engine.generate(
                prompt,
                SamplingParams(max_new_tokens=length, min_new_tokens=length, seed=1000 * seed + 100 * group + member),
                request_id=f"{seed}-{group}-{member}",
            )
            for group, prompt in enumerate(prompts)
            for member in members
        )
    )


async def _greedy(engine: Engine, prompts: Sequence[NDArray[np.int32]]) -> list[Completion]:
    params = SamplingParams(max_new_tokens=32, temperature=0.0)
    return await asyncio.gather(
        *(engine.generate(prompt, params, request_id=f"greedy-{index}") for index, prompt in enumerate(prompts))
    )


class Reference:
    """transformers on the same checkpoint."""

    def __init__(self, model: Model, workload: EngineWorkload) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._torch = torch
        self._workload = workload
        loaded: Any = AutoModelForCausalLM
        self._model = loaded.from_pretrained(model.checkpoint, dtype=torch.float32, local_files_only=True).eval()
        self._stop_ids = sorted(model.tokenizer.eos_token_ids)
        self._pad_id = self._stop_ids[0]

    def seconds(self, prompts: Sequence[NDArray[np.int32]], threads: int) -> float:
        """Return how long ``generate()`` takes for the workload."""
        torch = self._torch
        torch.set_num_threads(threads)
        ids, mask = self._padded(prompts)
        length = self._workload.new_tokens
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=length,
                min_new_tokens=length,
                num_return_sequences=self._workload.n_samples_per_prompt,
                pad_token_id=self._pad_id,
                use_cache=True,
            )
        return time.perf_counter() - started

    def greedy(self, prompts: Sequence[NDArray[np.int32]]) -> list[list[int]]:
        """Return the greedy continuations of each prompt alone."""
        torch, found = self._torch, []
        for prompt in prompts:
            ids = torch.from_numpy(prompt.astype(np.int64))[None]
            with torch.inference_mode():
                whole = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    temperature=None,
                    top_p=None,
                    top_k=None,
                    max_new_tokens=32,
                    pad_token_id=self._pad_id,
                )
            found.append(whole[0, ids.shape[1] :].tolist())
        return found

    def logprob_differences(
        self, prompts: Sequence[NDArray[np.int32]], completions: Sequence[Completion]
    ) -> NDArray[np.float64]:
        """Return our logprobs minus those of a forward pass over the final tokens, of all tokens.

        Stop tokens could not be sampled, so they are left out of the reference's distribution too.
        """
        torch, found = self._torch, []
        for index, completion in enumerate(completions):
            prompt = prompts[index // self._workload.n_samples_per_prompt]
            ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids]).astype(np.int64))[None]
            with torch.inference_mode():
                logits = self._model(ids).logits[0, len(prompt) - 1 : -1].double()
                # min_new_tokens forbids stop tokens up to the last token.
                logits[:, self._stop_ids] = -torch.inf
            expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
            found.append(completion.logprobs - expected)
        return np.concatenate(found)

    @property
    def num_weights(self) -> int:
        """Weights that every step reads: all but the embedding, which is looked up, and the head that may be tied."""
        total = sum(int(weight.numel()) for weight in self._model.parameters())
        embedding, head = self._model.get_input_embeddings().weight, self._model.get_output_embeddings().weight
        return total if embedding is head else total - int(embedding.numel())

    def seconds_to_read(self, num_bytes: float, threads: int) -> float:
        """Return how long reading so much memory takes, by summing up an array larger than the caches."""
        torch = self._torch
        torch.set_num_threads(threads)
        array = torch.ones(1 << 27)
        times: list[float] = []
        for _ in range(5):
            started = time.perf_counter()
            array.sum()
            times.append(time.perf_counter() - started)
        return min(times) * num_bytes / (4 * len(array))

    def _padded(self, prompts: Sequence[NDArray[np.int32]]) -> tuple[Any, Any]:
        torch, longest = self._torch, max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), longest), self._pad_id, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, longest - len(prompt) :] = 1
        return ids, mask
